"""hr_simulate, the best possible cache, and reading traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace_tools.simulate.belady import belady, next_uses
from headrace_tools.simulate.trace import TraceError, read_trace

TOKENS, LAYERS, EXPERTS, TOP_K = 80, 3, 16, 4


@pytest.fixture(scope="module")
def routes() -> np.ndarray:
    """Popular experts and much that comes again, int32 [TOKENS, LAYERS, TOP_K]."""
    rng = np.random.default_rng(1)
    weights = 1 / np.arange(1, EXPERTS + 1)
    order = [rng.permutation(EXPERTS) for _ in range(LAYERS)]
    out = np.empty((TOKENS, LAYERS, TOP_K), np.int32)
    for t in range(TOKENS):
        for layer in range(LAYERS):
            drawn = rng.choice(EXPERTS, TOP_K, replace=False, p=weights / weights.sum())
            out[t, layer] = order[layer][drawn]
            if t and rng.random() < 0.6:
                out[t, layer] = out[t - 1, layer]
    return out


def plain_lru(routes: np.ndarray, slots: int, warm_up: int) -> tuple[int, int]:
    """Global LRU that spares what the layer wants."""
    held: dict[tuple[int, int], int] = {}
    hits = misses = clock = 0
    for t, token in enumerate(routes.tolist()):
        for layer, wanted in enumerate(token):
            keys = [(layer, e) for e in wanted if e >= 0]
            present = [k for k in keys if k in held]
            if t >= warm_up:
                hits += len(present)
                misses += len(keys) - len(present)
            for key in sorted(keys):
                if key not in held and len(held) >= slots:
                    victims = [k for k in held if k not in keys]
                    if not victims:
                        continue
                    del held[min(victims, key=held.__getitem__)]
                held[key] = 0
            for key in sorted(keys):
                if key in held:
                    clock += 1
                    held[key] = clock
    return hits, misses


@pytest.mark.parametrize("slots", [0, 1, 5, 12, 13, 20, 30, 47, 48, 100])
def test_lru_is_lru(headrace, routes, slots: int) -> None:
    found = headrace.simulate(routes, slots, experts=EXPERTS, policy="lru", warm_up=10)
    hits, misses = plain_lru(routes, slots, 10)
    assert found.hits + found.misses == hits + misses == (TOKENS - 10) * LAYERS * TOP_K
    # Below a layer's experts it matters which of the misses stays; nothing says which.
    assert abs(found.hits - hits) <= (0 if slots >= LAYERS * TOP_K or slots == 0 else 40)


@pytest.mark.parametrize("policy", ["auto", "lru", "lfu"])
def test_no_policy_beats_the_future(headrace, routes, policy: str) -> None:
    for slots in (2, 6, 12, 18, 24, 36, 48):
        found = headrace.simulate(routes, slots, experts=EXPERTS, policy=policy)
        hits, misses = belady(routes, slots, EXPERTS)
        assert found.hits + found.misses == hits + misses
        assert found.hits <= hits, f"{policy} at {slots}"


def test_everything_fits(headrace, routes) -> None:
    found = headrace.simulate(routes, 48, experts=EXPERTS)
    distinct = sum(len(np.unique(routes[:, layer])) for layer in range(LAYERS))
    assert found.misses == distinct == belady(routes, 48, EXPERTS)[1]
    assert found.evictions == 0 and found.tokens == TOKENS


def test_misses_are_counted_by_layer(headrace, routes) -> None:
    found = headrace.simulate(routes, 15, experts=EXPERTS, warm_up=20)
    counts = found.layer_misses
    assert len(counts) == TOP_K + 1 and sum(counts) == (TOKENS - 20) * LAYERS
    assert sum(n * count for n, count in enumerate(counts)) == found.misses
    assert sum(found.miss_shares) == pytest.approx(1)


def test_a_chunk_asks_once_for_each_expert(headrace, routes) -> None:
    found = headrace.simulate(routes[:24], 48, experts=EXPERTS, prefill=24, chunk=8)
    asked = sum(len(np.unique(routes[at : at + 8, layer]))
                for at in (0, 8, 16) for layer in range(LAYERS))
    assert found.hits + found.misses == asked
    assert sum(found.layer_misses) == 0, "of single tokens only"


def test_shorter_lists(headrace, routes) -> None:
    short = routes.copy()
    short[:, 1, 2:] = -1
    found = headrace.simulate(short, 20, experts=EXPERTS)
    assert found.hits + found.misses == TOKENS * (2 * TOP_K + 2)
    assert sum(belady(short, 20, EXPERTS)) == TOKENS * (2 * TOP_K + 2)


@pytest.mark.parametrize("change, text", [
    (lambda r: r.__setitem__((3, 1, 2), EXPERTS), "token 3, layer 1: expert 16 is out"),
    (lambda r: r.__setitem__((3, 1, 2), -2), "out of range"),
    (lambda r: r.__setitem__((4, 2), 7), "token 4, layer 2: expert 7 is there twice")])
def test_ids_are_checked(headrace, routes, change, text: str) -> None:
    wrong = routes.copy()
    change(wrong)
    with pytest.raises(headrace.UsageError, match=text):
        headrace.simulate(wrong, 10, experts=EXPERTS)


def test_arguments_are_checked(headrace, routes) -> None:
    for bad in (dict(experts=3), dict(experts=1 << 20), dict(experts=EXPERTS, chunk=9999)):
        with pytest.raises(headrace.UsageError, match="out of range"):
            headrace.simulate(routes, 10, **bad)
    with pytest.raises(headrace.UsageError):
        headrace.simulate(routes[0], 10, experts=EXPERTS)


# ---- the future ------------------------------------------------------------------------------------


def test_next_uses() -> None:
    routes = np.array([[[0, 1]], [[1, 2]], [[0, 3]]], np.int32)
    assert next_uses(routes, 4).tolist() == [[[2, 1]], [[3, 3]], [[3, 3]]]


def test_belady_passes_over_what_is_needed_later() -> None:
    # Two of three come at every token, the third now and then: keeping it would cost a hit.
    routes = np.array([[[0, 1]], [[0, 2]], [[0, 1]], [[0, 1]]], np.int32)
    assert belady(routes, 2, 4) == (5, 3) and belady(routes, 0, 4) == (0, 8)
    assert belady(routes, 3, 4) == (5, 3)


# ---- traces ----------------------------------------------------------------------------------------


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_trace_with_and_without_description(tmp_path) -> None:
    tokens = [{"tok": 0, "layers": [[5, 1], [2]]}, {"tok": 1, "layers": [[0, 1], [3, 6]]}]
    plain = read_trace(write(tmp_path / "plain", *tokens))
    assert plain.routes.tolist() == [[[5, 1], [2, -1]], [[0, 1], [3, 6]]]
    assert (plain.experts, plain.record_bytes, plain.working_set, plain.total) == (8, 0, 4, 16)
    about = read_trace(write(tmp_path / "about", {"headrace": {"experts": 32, "record_bytes": 4096}},
                             *tokens))
    assert (about.experts, about.record_bytes) == (32, 4096)
    assert np.array_equal(about.routes, plain.routes)


@pytest.mark.parametrize("lines, text", [
    ([], "no token"),
    (["{"], "line 1: is no JSON"),
    (["[]"], "no JSON object"),
    (['{"tok": 0}'], "line 1: 'layers'"),
    (['{"layers": [[1], []]}'], "no list of expert ids"),
    (['{"layers": [[1.5]]}'], "no list of expert ids"),
    (['{"layers": [[-1]]}'], "out of range"),
    (['{"layers": [[2, 2]]}'], "twice"),
    (['{"layers": [[1]]}', '{"layers": [[1], [2]]}'], "line 2: has 2 layers"),
    (['{"headrace": {"experts": "8"}}', '{"layers": [[1]]}'], "'experts'"),
    (['{"headrace": {"experts": 2}}', '{"layers": [[2]]}'], "expert 2 of 2")])
def test_traces_that_are_none(tmp_path, lines: list[str], text: str) -> None:
    (tmp_path / "trace").write_text("\n".join(lines))
    with pytest.raises(TraceError, match=text):
        read_trace(tmp_path / "trace")
