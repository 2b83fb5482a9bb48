"""What the containers of support/platforms.py hold leaves out no part and no codec of the engine."""

from __future__ import annotations

import json
import re

from support.build import ROOT


def words(path: str, arrays: str) -> set[str]:
    """The strings of C arrays called `arrays` (a pattern) in a source file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = re.findall(rf"\*const (?:{arrays})\[[A-Z_]*\] = \{{(.*?)\}};", text, re.DOTALL)
    assert found, f"{path} has no array called {arrays}"
    return {word for body in found for word in re.findall(r'"(\w+)"', body)}


def strings(value: object) -> set[str]:
    """Every string and key anywhere in a JSON value."""
    if isinstance(value, dict):
        return set(value) | set().union(*map(strings, value.values()), set())
    if isinstance(value, list):
        return set().union(*map(strings, value), set())
    return {value} if isinstance(value, str) else set()


def test_every_part_and_codec_occurs(scored):
    used = set()
    for one in scored.values():
        used |= strings(json.loads((one.path / "manifest.json").read_text(encoding="utf-8")))
    needed = words("engine/model/architecture.c", "kinds|routers|gates")
    needed |= words("engine/model/part_reader.c", "kinds")
    needed |= words("engine/quant/codec.c", "[a-z_]*names?") - {"none"}
    needed |= {"sparse", "ngram", "sinks", "select_bias", "expert_bias", "latent", "output_gate"}
    assert needed <= used, f"never run on another machine: {sorted(needed - used)}"
