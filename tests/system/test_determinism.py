"""The determinism contract: settings decide speed, never bits (docs/determinism.md)."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest

VALIDATION = Path(__file__).resolve().parents[2] / "models" / "val.txt"
TOKENS = 100

AXES = {
    "isa": ["reference", "avx2", "avx512", "neon"],
    "threads": [1, 2, 3, 7],
    "chunk": [1, 7, 64, 512],
    "ram": ["floor", "quarter", "all"],
    "direct": [True, False],
    "shuffle_reads": [0, 1, 12345],
    "cache_policy": ["auto", "lru", "lfu"],
    "read_ahead": ["off", "auto", 2, 64],
    "verify": ["first", "always", "off"],
    "usage": [False, True],
    "lock": ["auto", "off"],
}


def covering_pairs(axes: dict[str, list]) -> list[dict]:
    """A few settings in which every pair of values of two axes occurs (greedily chosen)."""
    names = list(axes)
    open_pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in axes[a] for y in axes[b]
    }
    rows = []
    while open_pairs:
        a, x, b, y = min(open_pairs, key=repr)
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(axes[name], key=lambda value: sum(
                    ((m, row[m], name, value) in open_pairs or (name, value, m, row[m]) in open_pairs)
                    for m in row))
        open_pairs -= {(m, row[m], n, row[n]) for m, n in itertools.combinations(names, 2)}
        rows.append(row)
    return rows


def budgets(headrace, path: Path, **settings) -> dict[str, int]:
    """ram in bytes: the floor, a quarter of the experts, and everything."""
    plan = headrace.plan(path, ctx=256, **settings)
    whole = plan.total_experts * plan.record_bytes
    return {"floor": plan.floor, "quarter": plan.floor + whole // 4,
            "all": plan.floor + whole + (16 << 20)}


def digest(headrace, path: Path, ids: list[int], row: dict, usage: Path) -> str:
    settings = row | {"usage": usage if row["usage"] else None}
    level = settings.pop("ram")
    sizes = budgets(headrace, path, chunk=settings["chunk"], threads=settings["threads"],
                    read_ahead=settings.get("read_ahead", "auto"))
    with headrace.Model(path, ctx=256, ram=sizes[level], **settings) as model:
        assert model.info.isa.startswith(settings["isa"])  # "neon" may become "neon-dotprod"
        logits = model.logits(ids)
        assert model.stats.leases == 0
    return hashlib.sha256(logits.tobytes()).hexdigest()


def available_isas(headrace, path: Path) -> list[str]:
    found = []
    for isa in AXES["isa"]:
        try:
            with headrace.Model(path, isa=isa, ctx=64):
                found.append(isa)
        except (headrace.UsageError, headrace.UnsupportedError):
            pass
    return found


@pytest.fixture(scope="module", params=["int8", "bf16"])
def container(request) -> Path:
    return request.getfixturevalue("model_dir" if request.param == "int8" else "model_bf16")


@pytest.mark.slow
def test_same_bits_over_the_matrix(container, headrace, tmp_path):
    isas = available_isas(headrace, container)
    assert "reference" in isas
    with headrace.Model(container, ctx=256) as model:
        ids = model.tokenize(VALIDATION.read_text(encoding="utf-8")[:2000])[:TOKENS]
        model.logits(ids[::-1])
        model.save_usage(tmp_path / "usage")
    assert len(ids) == TOKENS
    rows = covering_pairs(AXES | {"isa": isas})
    digests = {}
    for row in rows:
        digests.setdefault(digest(headrace, container, ids, row, tmp_path / "usage"), []).append(row)
    assert len(digests) == 1, f"{len(digests)} different results: {digests}"


def test_warm_equals_cold(model_dir, headrace):
    """The second evaluation finds the cache filled, and the state fresh."""
    with headrace.Model(model_dir, ctx=256) as model:
        ids = model.tokenize(VALIDATION.read_text(encoding="utf-8")[:600])[:64]
        cold = model.logits(ids)
        before = model.stats
        warm = model.logits(ids)
        assert model.stats.reads == before.reads, "everything was cached"
    assert cold.tobytes() == warm.tobytes()


def test_prefill_equals_decode(model_dir, headrace):
    """Greedy ids of a generation are those of one pass over prompt and ids."""
    with headrace.Model(model_dir, ctx=256) as model:
        prompt = model.tokenize("It was a fine morning in the spring, when Elizabeth")
        made = model.generate(prompt, max_tokens=40, ignore_stop_ids=True)
        rows = model.logits([*prompt, *made.ids])
    assert rows[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == made.ids


def test_sampling_does_not_depend_on_settings(model_dir, headrace):
    texts = set()
    for settings in ({"threads": 1, "chunk": 1}, {"threads": 2}, {"isa": "reference", "threads": 3}):
        with headrace.Model(model_dir, ctx=256, **settings) as model:
            texts.add(model.generate("The captain", max_tokens=40, temperature=0.8, top_k=40,
                                     top_p=0.95, seed=7).text)
    assert len(texts) == 1
