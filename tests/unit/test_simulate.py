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


def test_ids_are_not_rounded_or_wrapped(headrace, routes) -> None:
    wide = routes.astype(np.int64)
    assert headrace.simulate(wide, 5, experts=EXPERTS) == headrace.simulate(routes, 5, experts=EXPERTS)
    wide[3, 1, 2] += 1 << 32
    with pytest.raises(headrace.UsageError, match="routes: an id is out of range"):
        headrace.simulate(wide, 5, experts=EXPERTS)
    with pytest.raises(TypeError, match="guesses are float64"):
        headrace.simulate(routes, 5, experts=EXPERTS, guesses=routes + 0.5, read_ahead=1)


def test_arguments_are_checked(headrace, routes) -> None:
    for bad in (dict(experts=3), dict(experts=1 << 20), dict(experts=EXPERTS, chunk=9999)):
        with pytest.raises(headrace.UsageError, match="out of range"):
            headrace.simulate(routes, 10, **bad)
    with pytest.raises(headrace.UsageError):
        headrace.simulate(routes[0], 10, experts=EXPERTS)


# ---- reading ahead ---------------------------------------------------------------------------------


def wrong(routes: np.ndarray) -> np.ndarray:
    """Experts that the token does not use, as many."""
    out = np.empty_like(routes)
    for at in np.ndindex(routes.shape[:2]):
        out[at] = np.setdiff1d(np.arange(EXPERTS), routes[at])[: routes.shape[2]]
    return out


@pytest.mark.parametrize("slots", [0, 7, 20, 40])
def test_guesses_change_no_hit_and_add_up(headrace, routes, slots: int) -> None:
    plain = headrace.simulate(routes, slots, experts=EXPERTS, warm_up=20)
    first = headrace.simulate(routes[:, :1], min(slots, 10), experts=EXPERTS)
    assert plain.ahead_issued == first.ahead_issued == 0
    for guesses, right in ((routes, True), (wrong(routes), False)):
        for width in (1, TOP_K):
            found = headrace.simulate(routes, slots, experts=EXPERTS, warm_up=20, guesses=guesses,
                                      read_ahead=width)
            assert (found.hits, found.misses) == (plain.hits, plain.misses)
            assert found.ahead_issued == found.ahead_used + found.ahead_wasted > 0
            assert found.ahead_wasted == 0 if right else found.ahead_used == 0
    # Of every layer but the first all misses were foreseen.
    foreseen = headrace.simulate(routes, slots, experts=EXPERTS, guesses=routes, read_ahead=TOP_K)
    none = headrace.simulate(routes, 0, experts=EXPERTS, guesses=routes, read_ahead=TOP_K)
    assert none.misses - none.ahead_used == TOKENS * TOP_K
    assert foreseen.misses - foreseen.ahead_used <= TOKENS * TOP_K


def test_prefill_and_a_cache_of_everything_guess_nothing(headrace, routes) -> None:
    for slots, prefill, issued in ((20, TOKENS, False), (48, 0, False), (47, 0, True), (20, 60, True)):
        found = headrace.simulate(routes, slots, experts=EXPERTS, prefill=prefill, chunk=20,
                                  guesses=routes, read_ahead=2)
        assert (found.ahead_issued > 0) == issued, (slots, prefill)
    pairs = headrace.simulate(routes, 0, experts=EXPERTS, prefill=TOKENS, chunk=2, guesses=routes,
                              read_ahead=TOP_K)
    union = sum(len(np.unique(routes[t : t + 2, layer])) for t in range(0, TOKENS, 2)
                for layer in (1, 2))
    assert pairs.ahead_issued == pairs.ahead_used == union, "two tokens at once are still guessed"


def test_time(headrace) -> None:
    """Two layers of one token, all missed; numbers by hand."""
    routes = np.array([[[0, 1], [2, 3]]], np.int32)
    guesses = np.array([[[-1, -1], [2, 7]]], np.int32)

    def run(width: int, **pace: float):
        return headrace.simulate(routes, 0, experts=8, guesses=guesses, read_ahead=width,
                                 pace=headrace.Pace(**pace))

    found = run(0, read=4.0, layer=3.0, expert=1.0)
    # layer 3, reads 8, the last expert 1, twice; 4 of it were two experts' arithmetic
    assert (found.alone, found.seconds) == (1, 24) and found.seconds_wanted == 16
    assert found.seconds_blocked == 24 - 2 * (3 + 2)
    found = run(1, read=4.0, layer=3.0, expert=1.0)
    # expert 2 is read from 11 to 15, when its layer begins; 3 from then on
    assert found.seconds == 20 and found.seconds_blocked == 10 and found.ahead_used == 1
    found = run(2, read=4.0, layer=3.0, expert=1.0, in_flight=1)
    # expert 7 begins just then, too late to be taken back: 3 is there at 23
    assert found.seconds == 24 and (found.ahead_wasted, found.ahead_cancelled) == (1, 0)
    found = run(2, read=4.0, layer=2.0, expert=1.0, in_flight=1)
    # from 10 to 14 expert 2, asked for at 13: 7 has not begun, 3 follows
    assert found.seconds == 19 and (found.ahead_wasted, found.ahead_cancelled) == (0, 1)
    assert run(2, read=0.25, layer=2.0, expert=1.0).seconds == 8
    still = run(2, read=0.0)
    assert still.seconds == 0 and still.ahead_wasted == 1


def test_seconds_are_those_of_counted_single_tokens(headrace, routes) -> None:
    pace = headrace.Pace(read=1e-3, layer=2e-3, expert=1e-4)
    whole = headrace.simulate(routes, 15, experts=EXPERTS, pace=pace)
    part = headrace.simulate(routes, 15, experts=EXPERTS, pace=pace, prefill=10, chunk=5, warm_up=30)
    assert (whole.alone, part.alone) == (TOKENS, TOKENS - 30)
    assert 0 < part.seconds < whole.seconds
    least = part.alone * LAYERS * (2e-3 + TOP_K * 1e-4)
    assert part.seconds - part.seconds_blocked == pytest.approx(least)
    assert part.seconds_wanted == pytest.approx(1e-3 * part.misses)
    faster = headrace.simulate(routes, 15, experts=EXPERTS, pace=pace, warm_up=30, prefill=10, chunk=5,
                               guesses=routes, read_ahead=TOP_K)
    assert faster.seconds < part.seconds and faster.misses == part.misses


@pytest.mark.parametrize("prefill", [0, TOKENS])
def test_a_warm_up_beyond_the_last_token_counts_nothing(headrace, routes, prefill: int) -> None:
    found = headrace.simulate(routes, 15, experts=EXPERTS, warm_up=TOKENS + 5, prefill=prefill, chunk=16,
                              guesses=routes, read_ahead=2, pace=headrace.Pace(read=1e-3))
    assert found == headrace.Simulation(0, 0, 0, 0, 0, (0,) * (TOP_K + 1))


@pytest.mark.parametrize("change, text", [
    (dict(read_ahead=3), "as many guesses are needed, and there are 2"),
    (dict(guesses=None), "there are 0"), (dict(read_ahead=65), "out of range"),
    (dict(guesses=np.full((TOKENS, LAYERS, 2), EXPERTS, np.int32)), "guess 16 is out of range"),
    (dict(guesses=np.zeros((TOKENS, 1, 2), np.int32)), "tokens and layers differ")])
def test_guesses_are_checked(headrace, routes, change, text: str) -> None:
    args = {"guesses": routes[:, :, :2], "read_ahead": 2} | change
    with pytest.raises(headrace.UsageError, match=text):
        headrace.simulate(routes, 10, experts=EXPERTS, **args)
    with pytest.raises(headrace.UsageError, match="read_seconds"):
        headrace.simulate(routes, 10, experts=EXPERTS, pace=headrace.Pace(read=float("nan")))


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
    assert plain.guesses is None


def test_a_trace_with_guesses(tmp_path) -> None:
    tokens = [{"layers": [[5, 1], [2]], "ahead": [[], [2, 9]]}, {"layers": [[0, 1], [3]], "ahead": [[], [4]]}]
    found = read_trace(write(tmp_path / "t", {"headrace": {"format": 2}}, *tokens))
    assert found.guesses.tolist() == [[[-1, -1], [2, 9]], [[-1, -1], [4, -1]]]
    assert found.experts == 16 and found.routes.shape == (2, 2, 2)
    empty = [{"layers": [[1]], "ahead": [[]]}]
    assert read_trace(write(tmp_path / "t", *empty)).guesses is None


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
    (['{"headrace": {"format": 3}}', '{"layers": [[1]]}'], "routes of format 3; 2 is the last"),
    (['{"layers": [[1]], "ahead": [[], [2]]}'], "guesses 2 layers of 1"),
    (['{"layers": [[1]], "ahead": [[2, 2]]}'], "twice"),
    (['{"layers": [[1]], "ahead": [[2]]}', '{"layers": [[1]]}'], "line 2: 'ahead' is not there"),
    (['{"layers": [[1]]}', '{"layers": [[1]], "ahead": [[2]]}'], "line 2: 'ahead' is not there"),
    (['{"headrace": {"experts": 2}}', '{"layers": [[2]]}'], "expert 2 of 2")])
def test_traces_that_are_none(tmp_path, lines: list[str], text: str) -> None:
    (tmp_path / "trace").write_text("\n".join(lines))
    with pytest.raises(TraceError, match=text):
        read_trace(tmp_path / "trace")
