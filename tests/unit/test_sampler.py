"""The sampler against a numpy model of the same pipeline, its random numbers, and its logarithm."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

HR_OK, HR_ERR_USAGE, HR_ERR_NUMERIC = 0, 1, 7


@dataclass(frozen=True)
class Params:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0


class Sampler:
    """One sampler of the library, in memory of its own."""

    def __init__(self, lib, params: Params, vocab: int, isa: str = "reference"):
        self.ffi, self.c = lib
        self.vocab = vocab
        self.s = self.ffi.new("struct sampler *")
        layout = self.ffi.new("struct carve *")
        for _ in range(2):  # measures, then lays out
            layout.used = 0
            self.c.sampler_carve(layout, vocab, self.s)
            if layout.base == self.ffi.NULL:
                self.memory = self.ffi.from_buffer(np.full(max(layout.used, 1), 0xA5, np.uint8))
                layout.base = self.ffi.cast("uint8_t *", self.memory)
        self.err = self.ffi.new("hr_error *")
        p = self.ffi.new("struct sampler_params *", params.__dict__)
        kernels = self.c.kernels_find(isa.encode())
        assert kernels != self.ffi.NULL
        self.status = self.c.sampler_open(self.s, p, vocab, kernels, self.err)

    @property
    def detail(self) -> str:
        return self.ffi.string(self.err.detail).decode()

    def see(self, ids) -> None:
        self.c.sampler_see(self.s, self.ffi.new("int32_t[]", list(ids)), len(ids))

    def next_status(self, logits: NDArray[np.float32], index: int) -> tuple[int, int, float]:
        """(status, id, logprob)"""
        data = np.ascontiguousarray(logits, np.float32)
        assert data.shape == (self.vocab,)
        out = self.ffi.new("int32_t *", -1)
        logprob = self.ffi.new("float *")
        status = self.c.sampler_next(self.s, self.ffi.from_buffer("float[]", data), index, out,
                                     logprob, self.err)
        return status, out[0], logprob[0]

    def next(self, logits: NDArray[np.float32], index: int = 0) -> int:
        status, token, _ = self.next_status(logits, index)
        assert status == HR_OK, self.detail
        return token


@pytest.fixture
def sampler(lib):
    def make(params: Params, vocab: int, **options) -> Sampler:
        return Sampler(lib, params, vocab, **options)

    return make


def reference_candidates(logits: NDArray[np.float32], p: Params, seen=()
                         ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float32]]:
    """Ids in draw order, their probabilities (float64, not renormalised), the penalised logits."""
    l = logits.astype(np.float32).copy()
    for i in set(seen):
        factor = np.float32(p.repetition_penalty)
        l[i] = l[i] / factor if l[i] > 0 else l[i] * factor
    order = np.lexsort((np.arange(len(l)), -l.astype(np.float64)))
    z = ((l - l.max()) / np.float32(p.temperature)).astype(np.float64)
    ranked = 0 < p.top_k < len(l)
    keep = order[: p.top_k] if ranked else np.arange(len(l))
    e = np.exp(np.maximum(z[keep], -200))
    prob = dict(zip(keep.tolist(), (e / e.sum()).tolist()))
    if p.top_p < 1:
        by_rank = [i for i in order.tolist() if i in prob]
        total, count = 0.0, 0
        while count < len(by_rank) and total < np.float32(p.top_p):
            total += prob[by_rank[count]]
            count += 1
        keep = np.array(by_rank[:count])
    best = max(prob[i] for i in keep.tolist())
    keep = np.array([i for i in keep.tolist() if prob[i] >= np.float32(p.min_p) * best])
    return keep, np.array([prob[i] for i in keep.tolist()]), l


def clear_cut(logits: NDArray[np.float32], p: Params) -> bool:
    """No sum of the likeliest probabilities is so near to top_p that rounding decides."""
    ranked = np.sort(logits.astype(np.float64) / p.temperature)[::-1][: p.top_k or len(logits)]
    sums = np.cumsum(np.exp(ranked - ranked[0]))
    return bool(np.abs(sums[:-1] / sums[-1] - p.top_p).min(initial=1) > 1e-6)


def reference_draw(keep, prob, uniform: float) -> tuple[int, float]:
    """The id, and the distance (in probability) of u from the nearest boundary."""
    edges = np.cumsum(prob) / prob.sum()
    at = int(np.searchsorted(edges, uniform, side="right"))
    at = min(at, len(keep) - 1)
    inner = edges[:-1]
    margin = float(np.abs(inner - uniform).min()) if len(inner) else 1.0
    return int(keep[at]), margin


# ---- the random numbers -----------------------------------------------------------------------

# The known-answer vectors published with the Random123 library for philox4x32-10.
PHILOX = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize("counter,key,expected", PHILOX)
def test_philox_known_answers(lib, counter, key, expected):
    ffi, c = lib
    out = ffi.new("uint32_t[4]")
    c.philox4x32(ffi.new("uint32_t[4]", counter), ffi.new("uint32_t[2]", key), out)
    assert list(out) == expected


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**64 - 1))
@settings(max_examples=50, deadline=None)
def test_uniform_is_made_of_the_first_two_words(lib, seed, index):
    ffi, c = lib
    out = ffi.new("uint32_t[4]")
    c.philox4x32(ffi.new("uint32_t[4]", [index & 0xFFFFFFFF, index >> 32, 0, 0]),
                 ffi.new("uint32_t[2]", [seed & 0xFFFFFFFF, seed >> 32]), out)
    u = c.random_uniform(seed, index)
    assert u == ((out[1] << 32 | out[0]) >> 11) * 2.0**-53
    assert 0 <= u < 1


def test_uniform_is_uniform(lib):
    """Chi-square over 64 cells of 40,000 numbers: 63 degrees, 1e-6 tail at 137."""
    _, c = lib
    for seed in (0, 1, 2**63):
        values = np.array([c.random_uniform(seed, i) for i in range(40_000)])
        counts = np.bincount((values * 64).astype(int), minlength=64)
        assert ((counts - 625) ** 2 / 625).sum() < 137


# ---- the logarithm ----------------------------------------------------------------------------

@given(st.floats(min_value=5e-324, max_value=1.7e308))
@settings(max_examples=400, deadline=None)
def test_log_is_accurate(lib, x):
    _, c = lib
    assert c.log_exact(x) == pytest.approx(math.log(x), rel=1e-15, abs=1e-15)


@pytest.mark.parametrize("x", [1.0, 2.0, 0.5, math.e, 1 + 2**-52, 1 - 2**-53, 5e-324, 1.5e-310,
                               300_000.0, math.sqrt(2), math.sqrt(0.5)])
def test_log_at_landmarks(lib, x):
    _, c = lib
    assert abs(c.log_exact(x) - math.log(x)) <= 2e-16 * max(1.0, abs(math.log(x)) * 2)
    if x == 1.0:
        assert c.log_exact(x) == 0.0


# ---- greedy -----------------------------------------------------------------------------------

def test_greedy_takes_the_lowest_id_among_equals(sampler):
    logits = np.full(1000, -1, np.float32)
    logits[[700, 31, 999]] = 5
    assert sampler(Params(), 1000).next(logits) == 31
    assert sampler(Params(), 1000).next(np.zeros(1000, np.float32)) == 0


def test_one_token_vocabulary(sampler):
    for p in (Params(), Params(temperature=1), Params(temperature=1, top_k=5, top_p=0.5, min_p=0.5)):
        status, token, logprob = sampler(p, 1).next_status(np.array([3.0], np.float32), 0)
        assert (status, token, logprob) == (HR_OK, 0, 0.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(sampler, bad, temperature):
    logits = np.zeros(777, np.float32)
    logits[700] = bad
    s = sampler(Params(temperature=temperature), 777)
    status, _, _ = s.next_status(logits, 12)
    assert status == HR_ERR_NUMERIC
    assert "12" in s.detail


# ---- against the numpy model ------------------------------------------------------------------

PIPELINES = [
    Params(temperature=1.0),
    Params(temperature=0.7, top_k=40),
    Params(temperature=0.8, top_k=40, top_p=0.95),
    Params(temperature=1.3, top_p=0.9),
    Params(temperature=1.0, min_p=0.05),
    Params(temperature=1.0, top_p=0.8, min_p=0.1),
    Params(temperature=0.9, top_k=100, top_p=0.7, min_p=0.02, repetition_penalty=1.2),
    Params(temperature=1.0, repetition_penalty=0.8),
    Params(temperature=5.0, top_k=4095),
]


@pytest.mark.parametrize("params", PIPELINES, ids=str)
@pytest.mark.parametrize("vocab", [17, 4096])
def test_ids_equal_the_numpy_model(lib, sampler, params, vocab):
    """Same uniform number, same id, wherever it is not within 1e-5 of a boundary."""
    _, c = lib
    compared = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        p = replace(params, seed=seed * 7919 + 1)
        s = sampler(p, vocab)
        seen = rng.integers(0, vocab, 12).tolist() if p.repetition_penalty != 1 else []
        s.see(seen)
        for index in range(25):
            logits = (rng.standard_normal(vocab) * 3).astype(np.float32)
            logits[rng.integers(0, vocab, 3)] = 6.5  # ties at the top
            keep, prob, _ = reference_candidates(logits, p, seen)
            expected, margin = reference_draw(keep, prob, c.random_uniform(p.seed, index))
            token = s.next(logits, index)
            assert token in keep
            if margin > 1e-5:
                assert token == expected
                compared += 1
    assert compared > 80


def test_every_kernel_table_draws_the_same_ids(lib, sampler):
    ffi, c = lib
    names, table = [], c.kernels_available()
    while table[len(names)] != ffi.NULL:
        names.append(ffi.string(table[len(names)]).decode())
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((20, 5003)) * 4).astype(np.float32)
    for p in (Params(temperature=1, seed=3), Params(temperature=0.8, top_p=0.95, seed=4),
              Params(temperature=0.8, top_k=50, min_p=0.01, seed=5)):
        results = []
        for name in names:
            s = sampler(p, 5003, isa=name)
            results.append([s.next_status(row, i) for i, row in enumerate(logits)])
        assert all(r == results[0] for r in results)


def test_frequencies_follow_the_probabilities(sampler):
    """20,000 draws from 8 ids: chi-square with 7 degrees, 1e-6 tail at 41."""
    logits = np.log(np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02])).astype(np.float32)
    s = sampler(Params(temperature=1, seed=99), 8)
    counts = np.bincount([s.next(logits, i) for i in range(20_000)], minlength=8)
    expected = 20_000 * np.exp(logits.astype(np.float64))
    assert ((counts - expected) ** 2 / expected).sum() < 41


def test_temperature_flattens(sampler):
    logits = np.array([2.0, 0.0], np.float32)
    share = {}
    for t in (0.5, 1.0, 4.0):
        s = sampler(Params(temperature=t, seed=1), 2)
        share[t] = np.mean([s.next(logits, i) == 0 for i in range(4000)])
        assert share[t] == pytest.approx(1 / (1 + math.exp(-2 / t)), abs=0.03)
    assert share[0.5] > share[1.0] > share[4.0]


# ---- edges of the filters ---------------------------------------------------------------------

def draws(s: Sampler, logits, n: int = 400) -> set[int]:
    return {s.next(logits, i) for i in range(n)}


def test_top_k_one_is_greedy_with_ties_by_id(sampler):
    logits = np.zeros(50, np.float32)
    logits[[9, 4, 44]] = 1
    assert draws(sampler(Params(temperature=2, top_k=1), 50), logits) == {4}
    assert draws(sampler(Params(temperature=2, top_k=2), 50), logits) == {4, 9}
    assert draws(sampler(Params(temperature=2, top_k=3), 50), logits) == {4, 9, 44}


def test_top_k_of_the_whole_vocabulary_is_off(sampler):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(64).astype(np.float32)
    want = [sampler(Params(temperature=1), 64).next(logits, i) for i in range(200)]
    for k in (64, 65, 2**32 - 1):
        s = sampler(Params(temperature=1, top_k=k), 64)
        assert [s.next(logits, i) for i in range(200)] == want


def test_top_p_keeps_the_shortest_prefix(sampler):
    logits = np.log(np.array([0.05, 0.5, 0.3, 0.15])).astype(np.float32)
    assert draws(sampler(Params(temperature=1, top_p=1e-6), 4), logits) == {1}
    assert draws(sampler(Params(temperature=1, top_p=0.49), 4), logits) == {1}
    assert draws(sampler(Params(temperature=1, top_p=0.6), 4), logits) == {1, 2}
    assert draws(sampler(Params(temperature=1, top_p=0.9), 4), logits) == {1, 2, 3}
    assert draws(sampler(Params(temperature=1, top_p=0.97), 4), logits) == {0, 1, 2, 3}


def test_top_p_among_equals_keeps_the_lowest_ids(sampler):
    assert draws(sampler(Params(temperature=1, top_p=0.25), 1024), np.zeros(1024, np.float32),
                 3000) <= set(range(256))


def test_min_p_drops_what_is_far_below_the_best(sampler):
    logits = np.log(np.array([0.6, 0.3, 0.07, 0.03])).astype(np.float32)
    assert draws(sampler(Params(temperature=1, min_p=0.9), 4), logits) == {0}
    assert draws(sampler(Params(temperature=1, min_p=0.4), 4), logits) == {0, 1}
    assert draws(sampler(Params(temperature=1, min_p=0.04), 4), logits, 1000) == {0, 1, 2, 3}


def test_extreme_temperatures(sampler):
    logits = np.array([1.0, 3.0, 2.9999998, -3e38, 3e-38], np.float32)
    assert draws(sampler(Params(temperature=1e-38), 5), logits) == {1}
    assert draws(sampler(Params(temperature=3e38), 5), logits) == {0, 1, 2, 3, 4}


def test_repetition_penalty(sampler):
    logits = np.array([2.0, 1.5, -1.0, -1.1], np.float32)
    s = sampler(Params(repetition_penalty=1.5), 4)
    assert s.next(logits) == 0
    s.see([0, 0, 0])  # once, however often it occurred: 2 / 1.5 < 1.5
    assert s.next(logits) == 1
    s.see([1])  # 1.333 against 1.0
    assert s.next(logits) == 0
    negative = sampler(Params(repetition_penalty=1.5), 2)
    negative.see([0])  # -1 * 1.5 < -1.1
    assert negative.next(logits[2:]) == 1
    for extreme in (1e-38, 3e38):
        s = sampler(Params(temperature=1, repetition_penalty=extreme), 4)
        s.see([0, 1, 2, 3])
        assert 0 <= s.next(logits) < 4


def test_last_bit_of_the_seen_set(sampler):
    logits = np.zeros(65, np.float32)
    logits[64] = 1
    s = sampler(Params(repetition_penalty=2), 65)
    s.see([64])
    assert s.next(logits) == 64  # 0.5 is still the highest
    logits[0] = 0.75
    assert s.next(logits) == 0


@given(st.integers(1, 600), st.integers(0, 2**32 - 1), st.integers(1, 700),
       st.sampled_from([0.01, 0.5, 0.99, 1.0]))
@settings(max_examples=60, deadline=None)
def test_heap_selection_equals_a_sort(lib, vocab, seed, top_k, top_p):
    """Coarse logits make many ties; only candidates of the numpy model may come out."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 4, vocab).astype(np.float32)
    p = Params(temperature=1, top_k=top_k, top_p=top_p, seed=seed)
    assume(clear_cut(logits, p))
    s = Sampler(lib, p, vocab)
    keep, prob, _ = reference_candidates(logits, p)
    for index in range(5):
        token = s.next(logits, index)
        expected, margin = reference_draw(keep, prob, lib[1].random_uniform(seed, index))
        if margin > 1e-5:
            assert token == expected


# ---- log-probability, seeds, limits -----------------------------------------------------------

@pytest.mark.parametrize("params", [Params(), Params(temperature=0.5, top_k=3),
                                    Params(temperature=2, repetition_penalty=1.5)], ids=str)
def test_logprob_is_of_the_model_alone(sampler, params):
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal(4096) * 4).astype(np.float32)
    s = sampler(params, 4096)
    s.see([1, 2, 3])
    for index in range(10):
        _, token, logprob = s.next_status(logits, index)
        wide = logits.astype(np.float64)
        expected = wide[token] - wide.max() - math.log(np.exp(wide - wide.max()).sum())
        assert logprob == pytest.approx(expected, abs=1e-5)


def test_seed_and_index_decide(sampler):
    logits = np.zeros(1000, np.float32)
    def sequence(seed):
        s = sampler(Params(temperature=1, seed=seed), 1000)
        return [s.next(logits, i) for i in range(20)]

    assert sequence(1) == sequence(1)
    assert sequence(1) != sequence(2)
    assert sequence(1) != sequence(1 + 2**32)
    s = sampler(Params(temperature=1, seed=1), 1000)
    assert [s.next(logits, i) for i in reversed(range(20))] == sequence(1)[::-1]


@pytest.mark.parametrize("field,value", [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
    ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("top_p", -1.0),
    ("min_p", -0.1), ("min_p", 1.0), ("min_p", math.nan),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan),
])
def test_parameters_out_of_range_are_named(sampler, field, value):
    s = sampler(replace(Params(temperature=1), **{field: value}), 10)
    assert s.status == HR_ERR_USAGE
    assert field in s.detail


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 4096, 151_936, 300_000, 2**24 + 1])
@pytest.mark.parametrize("longest", [0, 1, 17, 128, 65_536])
def test_the_plan_holds_what_a_generation_divides(lib, vocab, longest):
    """Sampler and text gate, one behind the other, in what a session keeps for them."""
    ffi, c = lib
    layout = ffi.new("struct carve *")
    c.text_gate_carve(layout, longest, ffi.new("struct text_gate *"))
    c.sampler_carve(layout, vocab, ffi.new("struct sampler *"))
    assert 12 * vocab + 3 * longest < layout.used <= c.plan_workspace(vocab, longest)
