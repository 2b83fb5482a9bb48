"""The same bits from every part of every family: kernels, threads, chunks and memory change nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from system.test_determinism import available_isas, digest

from conftest import FIXTURES, convert

FAMILIES = [
    "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_moonlight", "glm4_moe",
    "gpt_oss", "kimi_k2", "kimi_k3", "kimi_linear", "mixtral", "olmoe", "qwen3_moe", "qwen3_next",
    "qwen4_exp",
]  # fmt: skip
TOKENS = 45


@pytest.mark.parametrize("codec", ["int8", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_same_bits(name, codec, tmp_path, headrace):
    path = convert(FIXTURES / name, tmp_path / "model", "--experts", codec, "--trunk", codec,
                   "--no-tokenizer")  # fmt: skip
    vocab = json.loads((path / "manifest.json").read_text())["model"]["vocab_size"]
    ids = np.random.default_rng(7).integers(0, vocab, TOKENS).tolist()
    isas = available_isas(headrace, path)
    best = isas[-1]
    plain = {"direct": False, "shuffle_reads": 0, "cache_policy": "auto", "verify": "first",
             "read_ahead": "off", "usage": False, "lock": "auto"}
    other = {"direct": True, "shuffle_reads": 12345, "cache_policy": "lfu", "verify": "always",
             "read_ahead": 4, "usage": False, "lock": "off"}
    rows = [{"isa": isa, "threads": 2, "chunk": 64, "ram": "all", **plain} for isa in isas]
    rows += [
        {"isa": "reference", "threads": 1, "chunk": 1, "ram": "floor", **plain,
         "read_ahead": 4},
        {"isa": best, "threads": 3, "chunk": 7, "ram": "floor", **plain},
        {"isa": best, "threads": 1, "chunk": 44, "ram": "quarter", **other},
    ]
    found = {digest(headrace, path, ids, row, tmp_path / "usage") for row in rows}
    assert len(found) == 1, f"{len(found)} different results"
