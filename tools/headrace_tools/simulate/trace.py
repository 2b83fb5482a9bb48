"""Recorded routes: one JSON object a line, as `headrace trace` writes them.

A line has `layers`, a list of expert ids for each MoE layer, and may have `ahead`, what the layer before
each would have guessed; `tok` and other keys are ignored. A first line may be an object `headrace` that
describes the container.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


FORMAT = 2
"""Of formats/trace.md: the last that is known here."""


class TraceError(Exception):
    """A trace that cannot be used, and why."""


@dataclass(frozen=True)
class Trace:
    """routes: int32 [tokens, layers, top_k], -1 behind a shorter list. experts: of each layer, as far
    as known. record_bytes: of an expert, 0 when unknown. about: the description, or {}. guesses: int32
    [tokens, layers, ranks], the same, the best first; None when there are none."""

    routes: NDArray[np.int32]
    experts: int
    record_bytes: int
    about: dict[str, object]
    guesses: NDArray[np.int32] | None = None

    @property
    def working_set(self) -> int:
        """Experts of a token: layers x top_k."""
        return self.routes.shape[1] * self.routes.shape[2]

    @property
    def total(self) -> int:
        return self.routes.shape[1] * self.experts

    def check_model(self, layers: int, experts: int, top_k: int) -> None:
        """Raises TraceError unless these are routes of such a model. What a trace without a description
        says of `experts` is a guess."""
        known = (self.about.get("experts") or experts) == experts > int(self.routes.max())
        if self.routes.shape[1:] != (layers, top_k) or not known:
            raise TraceError(f"the trace has {self.routes.shape[1]} layers with {self.routes.shape[2]} of "
                             f"{self.experts} experts, the model {layers} with {top_k} of {experts}")


def _ids(value: object, where: str, key: str = "layers") -> list[list[int]]:
    if not isinstance(value, list) or not value:
        raise TraceError(f"{where}: {key!r} is no list of layers")
    for layer in value:
        if not isinstance(layer, list) or not all(type(e) is int for e in layer):
            raise TraceError(f"{where}: a layer is no list of expert ids")
        if not layer and key == "ahead":  # nobody guesses the first
            continue
        if not layer:
            raise TraceError(f"{where}: a layer is no list of expert ids")
        if min(layer) < 0 or max(layer) >= 1 << 16 or len(set(layer)) != len(layer):
            raise TraceError(f"{where}: expert ids are out of range, or one is there twice")
    return value


def _number(about: dict[str, object], key: str) -> int:
    value = about.get(key, 0)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise TraceError(f"line 1: {key!r} is no number")
    return value


def _array(tokens: list[list[list[int]]]) -> NDArray[np.int32]:
    """[tokens, layers, most of a list], -1 behind a shorter list."""
    most = max(len(layer) for token in tokens for layer in token)
    out = np.full((len(tokens), len(tokens[0]), most), -1, np.int32)
    for t, token in enumerate(tokens):
        for i, layer in enumerate(token):
            out[t, i, : len(layer)] = layer
    return out


def read_trace(path: Path) -> Trace:
    """Raises TraceError with the line, or OSError."""
    about: dict[str, object] = {}
    tokens: list[list[list[int]]] = []
    guesses: list[list[list[int]]] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{where}: is no JSON: {error}") from None
            if not isinstance(value, dict):
                raise TraceError(f"{where}: is no JSON object")
            if not tokens and not about and isinstance(value.get("headrace"), dict):
                about = value["headrace"]
                if (known := _number(about, "format")) > FORMAT:
                    raise TraceError(f"{where}: routes of format {known}; {FORMAT} is the last that is known")
                continue
            tokens.append(_ids(value.get("layers"), where))
            if len(tokens[-1]) != len(tokens[0]):
                raise TraceError(f"{where}: has {len(tokens[-1])} layers, the first {len(tokens[0])}")
            if "ahead" in value:
                guesses.append(_ids(value["ahead"], where, "ahead"))
                if len(guesses[-1]) != len(tokens[0]):
                    raise TraceError(f"{where}: guesses {len(guesses[-1])} layers of {len(tokens[0])}")
            if guesses and len(guesses) != len(tokens):
                raise TraceError(f"{where}: 'ahead' is not there for every token")
    if not tokens:
        raise TraceError(f"{path}: there is no token in it")
    routes, ahead = _array(tokens), _array(guesses) if guesses else None
    if ahead is not None and ahead.shape[2] == 0:
        ahead = None
    highest = max(int(routes.max()), -1 if ahead is None else int(ahead.max()))
    experts = _number(about, "experts") or 1 << highest.bit_length()
    if experts <= highest:
        raise TraceError(f"{path}: expert {highest} of {experts}")
    return Trace(routes, experts, _number(about, "record_bytes"), about, ahead)
