"""Which records the expert cache keeps: hit rates on traces with the habits of real routers."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path

import pytest

from containers import make_container
from store_tools import AUTO, LFU, LRU, Cache, Container

LAYERS, EXPERTS, TOP_K, TOKENS = 8, 48, 4, 160
WORKING_SET = LAYERS * TOP_K
# Of the previous token's choices a token repeats about 40 %, of the last four tokens' about 55 %; a
# tenth of the experts gets about half of all choices: what traces of trained models show.
KINDS = {"popular": (0.10, 0.05, 1.3), "recent": (0.28, 0.12, 1.0), "between": (0.20, 0.10, 1.0)}

Trace = list[list[list[int]]]
"""[token][layer] -> distinct experts."""


def make_trace(kind: str, seed: int = 5) -> Trace:
    """Each choice repeats one of the last token, or of the three before it, or is drawn by Zipf's law."""
    last, earlier, exponent = KINDS[kind]
    rng = random.Random(seed)
    steps = list(accumulate((i + 1) ** -exponent for i in range(EXPERTS)))
    orders = [rng.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]
    trace: Trace = []
    for _ in range(TOKENS):
        token = []
        for layer in range(LAYERS):
            chosen: set[int] = set()
            while len(chosen) < TOP_K:
                dice = rng.random()
                if trace and dice < last:
                    chosen.add(rng.choice(trace[-1][layer]))
                elif trace and dice < last + earlier:
                    chosen.add(rng.choice(rng.choice(trace[-4:-1] or trace)[layer]))
                else:
                    chosen.add(orders[layer][rng.choices(range(EXPERTS), cum_weights=steps)[0]])
            token.append(sorted(chosen))
        trace.append(token)
    return trace


def ideal_lru(trace: Trace, slots: int) -> float:
    """Per cent of requests that a least-recently-used cache answers; a layer's requests come together."""
    recent: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for token in trace:
        for layer, experts in enumerate(token):
            hits += sum((layer, e) in recent for e in experts)
            for e in experts:
                recent[layer, e] = None
                recent.move_to_end((layer, e))
            while len(recent) > slots:
                recent.popitem(last=False)
    return 100 * hits / (len(trace) * WORKING_SET)


@pytest.fixture(scope="module")
def container(lib, tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "c"
    make_container(path, layers=LAYERS, experts=EXPERTS, hidden=32, inner=16, codec="bf16",
                   top_k=TOP_K)
    with Container(lib, path) as c:
        yield c


@pytest.fixture(scope="module", params=KINDS)
def trace(request) -> Trace:
    return make_trace(request.param)


def hit_rate(container, trace: Trace, slots: int, policy: int = AUTO) -> float:
    """Per cent, one token after another."""
    with Cache(container, slots, policy=policy, working_set=WORKING_SET, transient=TOP_K) as cache:
        for token in trace:
            for bank, experts in enumerate(token):
                cache.run(bank, experts)
        s = cache.stats()
    assert s["hits"] + s["misses"] == len(trace) * WORKING_SET
    return 100 * s["hits"] / (s["hits"] + s["misses"])


def test_the_traces_are_like_real_ones(trace) -> None:
    repeated = near = 0
    counts: dict[tuple[int, int], int] = {}
    for t in range(4, TOKENS):
        for layer in range(LAYERS):
            now = set(trace[t][layer])
            repeated += len(now & set(trace[t - 1][layer]))
            near += len(now & {e for back in (1, 2, 3, 4) for e in trace[t - back][layer]})
            for e in now:
                counts[layer, e] = counts.get((layer, e), 0) + 1
    requests = (TOKENS - 4) * WORKING_SET
    assert 0.3 < repeated / requests < 0.5
    assert 0.5 < near / requests < 0.75
    top = sorted(counts.values(), reverse=True)[: LAYERS * EXPERTS // 10]
    assert 0.35 < sum(top) / requests < 0.6


def test_a_quarter_of_a_working_set_is_not_wasted(container, trace) -> None:
    """Where recency keeps nothing from one token to the next."""
    slots = WORKING_SET // 4
    assert ideal_lru(trace, slots) < 1
    assert hit_rate(container, trace, slots) >= 12


@pytest.mark.parametrize("sets", [1, 1.5, 2, 4])
def test_never_behind_recency(container, trace, sets) -> None:
    slots = int(sets * WORKING_SET)
    least = ideal_lru(trace, slots) - (1 if sets < 2 else 0)
    assert hit_rate(container, trace, slots) >= least


def test_recency_when_asked_for(container, trace) -> None:
    slots = 2 * WORKING_SET
    assert hit_rate(container, trace, slots, LRU) == pytest.approx(ideal_lru(trace, slots), abs=0.5)


def test_old_frequency_decays(container) -> None:
    """What was hot long ago gives way to what is used now."""
    with Cache(container, 2, policy=LFU, transient=2) as cache:
        for _ in range(30):
            cache.run(0, [0, 1])
        cache.run(0, [2])
        assert cache.stats()["evictions"] == 0, "a newcomer is colder than both"
        for _ in range(6 * 16):
            cache.run(0, [])
        cache.run(0, [2])
        assert cache.stats()["evictions"] == 1
        before = cache.stats()["reads"]
        cache.run(0, [2])
        assert cache.stats()["reads"] == before


def test_a_bank_ages_by_its_own_tokens(container) -> None:
    """Records whose bank has not had its turn are as warm as they were."""
    with Cache(container, 2, policy=LFU, transient=2) as cache:
        cache.run(1, [0, 1])
        for _ in range(50):
            cache.run(0, [])
        cache.run(0, [2])
        assert cache.stats()["evictions"] == 0
        cache.run(1, [0])
        assert cache.stats()["hits"] == 1


def chunk_of(cache: Cache, bank: int, tokens: list[list[int]]) -> None:
    """One batch for the choices of several tokens."""
    wanted = sorted({e for chosen in tokens for e in chosen})
    cache.begin(bank, wanted, chunk=tokens)
    while (lease := cache.next()) is not None:
        cache.release(lease)


def test_a_prompt_leaves_what_its_end_used(container) -> None:
    """Of a chunk that wants everything, the choices of the last tokens stay."""
    rng = random.Random(1)
    tokens = [rng.sample(range(EXPERTS - TOP_K), TOP_K) for _ in range(60)]
    late = list(range(EXPERTS - TOP_K, EXPERTS))
    tokens += 8 * [late]
    with Cache(container, TOP_K, policy=AUTO, working_set=WORKING_SET, transient=TOP_K) as cache:
        chunk_of(cache, 0, tokens)
        before = cache.stats()
        assert before["misses"] == len({e for chosen in tokens for e in chosen})
        cache.run(0, late)
        assert cache.stats()["hits"] - before["hits"] == TOP_K


def test_a_prompt_spares_hot_records_of_later_layers(container) -> None:
    """Reading a whole bank for a prompt does not throw out what the next banks will want."""
    with Cache(container, WORKING_SET, policy=AUTO, working_set=WORKING_SET,
               transient=TOP_K) as cache:
        hot = [[layer + i for i in range(TOP_K)] for layer in range(LAYERS)]
        for _ in range(8):
            for bank in range(LAYERS):
                cache.run(bank, hot[bank])
        chunk = [[(i + j) % EXPERTS for j in range(TOP_K)] for i in range(EXPERTS)]
        hits = []
        for bank in range(LAYERS):
            before = cache.stats()["hits"]
            chunk_of(cache, bank, [hot[bank], *chunk])
            hits.append(cache.stats()["hits"] - before)
        assert sum(hits[1:]) >= (LAYERS - 1) * TOP_K * 3 // 4
