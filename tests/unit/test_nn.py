"""Routing, attention and block selection against NumPy, part by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

RNG = np.random.default_rng(11)
F32 = 1  # the codec's number


def ranked(scores: np.ndarray, k: int) -> list[int]:
    """The k best: score descending, then id ascending."""
    return np.lexsort((np.arange(len(scores)), -scores))[:k].tolist()


class Parts:
    """What the parts need to run, and memory that lives as long."""

    def __init__(self, lib) -> None:
        self.ffi, self.c = lib
        self.kept: list = []
        self.budget = self.ffi.new("struct mem_budget *")
        self.c.mem_budget_init(self.budget, 0)
        pool = self.ffi.new("struct pool **")
        assert self.c.pool_create(2, self.budget, pool, self.ffi.NULL) == 0
        self.pool = pool[0]
        self.nn = self.ffi.new("struct nn *", {
            "k": self.c.kernels_find(b"reference"), "pool": self.pool,
        })  # fmt: skip

    def close(self) -> None:
        self.c.pool_free(self.pool)

    def floats(self, array) -> object:
        """A float pointer to a copy that starts at a multiple of 64."""
        flat = np.ascontiguousarray(array, np.float32).reshape(-1)
        room = np.zeros(flat.size * 4 + 64, np.uint8)
        start = -room.ctypes.data % 64
        view = room[start : start + flat.size * 4].view(np.float32)
        view[:] = flat
        self.kept += [room, pointer := self.ffi.from_buffer("float[]", view)]
        return pointer

    def carve(self, measure) -> object:
        """A carve with a block for what `measure(carve)` takes."""
        c = self.ffi.new("struct carve *")
        measure(c)
        room = np.zeros(c.used + 64, np.uint8)
        pointer = self.ffi.from_buffer("uint8_t[]", room)
        self.kept += [room, pointer]
        out = self.ffi.new("struct carve *")
        out.base = pointer + (-room.ctypes.data % 64)
        return out

    def matrix(self, w: np.ndarray) -> object:
        m = self.ffi.new("struct matrix *")
        blob = self.floats(w)
        self.c.matrix_bind(m, F32, w.shape[0], w.shape[1], blob)
        self.kept.append(m)
        return m[0]

    def input(self, x: np.ndarray) -> object:
        made = self.ffi.new("struct linear_input *")
        c = self.carve(lambda c: self.c.linear_input_carve(c, *x.shape, False, made))
        self.c.linear_input_carve(c, *x.shape, False, made)
        self.c.linear_input_set(made, self.floats(x), x.shape[1], *x.shape)
        return made


@pytest.fixture
def parts(lib):
    made = Parts(lib)
    yield made
    made.close()


# -- routing -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_top_k_is_a_stable_sort(lib, data):
    ffi, c = lib
    n = data.draw(st.integers(1, 80))
    k = data.draw(st.integers(1, n))
    scores = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n)), np.float32)
    if data.draw(st.booleans()):
        scores[data.draw(st.integers(0, n - 1))] = -np.inf
    out = ffi.new("int32_t[]", k)
    c.router_top_k(ffi.from_buffer("float[]", scores), n, k, out)
    assert list(out) == ranked(scores, k)


@pytest.mark.parametrize("n", [512, 4096])
def test_top_k_of_many(lib, n):
    ffi, c = lib
    for k in (1, 2, 7, 255, n):
        scores = RNG.integers(0, n // 3, n).astype(np.float32)
        out = ffi.new("int32_t[]", k)
        c.router_top_k(ffi.from_buffer("float[]", scores), n, k, out)
        assert list(out) == ranked(scores, k)


@dataclass
class Router:
    kind: int
    groups: int = 1
    kept: int = 1
    group_max: bool = False
    bias: bool = False
    select: bool = False
    renormalize: bool = True
    scaling: float = 1.0


def route(r: Router, logits, router_bias, select_bias, k):
    """(ids in rank order, weights) of one token, float64."""
    logits = logits + (router_bias if r.bias else 0)
    if r.kind == 2:
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    keys = (scores if r.kind == 2 else logits) + (select_bias if r.select else 0)
    if r.groups > 1:
        split = keys.reshape(r.groups, -1).copy()
        best = np.sort(split, -1)[:, -1 if r.group_max else -2 :].sum(-1)
        kept = ranked(best, r.kept)
        split[[g for g in range(r.groups) if g not in kept]] = -np.inf
        keys = split.reshape(-1)
    ids = ranked(keys, k)
    weights = scores[ids]
    if r.kind == 1 or r.renormalize:
        weights = weights / weights.sum()
    return ids, weights * r.scaling


ROUTERS = [
    Router(0), Router(0, renormalize=False, scaling=2.5), Router(0, 4, 2, True, renormalize=False),
    Router(1, bias=True, renormalize=False), Router(2), Router(2, select=True),
    Router(2, 4, 1, select=True, scaling=1.7), Router(2, 6, 3, select=True, renormalize=False),
    Router(2, 24, 8, select=True),
]  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_routers(parts, router):
    ffi, c = parts.ffi, parts.c
    tokens, experts, k = 9, 24, 4
    x = RNG.standard_normal((tokens, experts)).astype(np.float32)
    biases = RNG.standard_normal((2, experts)).astype(np.float32) * 0.3
    part = ffi.new("struct moe_part *", {
        "experts": experts, "top_k": k, "groups": router.groups, "top_groups": router.kept,
        "router": router.kind, "router_bias": router.bias, "select_bias": router.select,
        "group_max": router.group_max, "renormalize": router.renormalize, "scaling": router.scaling,
    })  # fmt: skip
    weights = ffi.new("struct moe_weights *")
    weights.router = parts.matrix(np.eye(experts))  # the logits are the input
    weights.router_bias, weights.select_bias = (parts.floats(b) for b in biases)
    scratch = ffi.new("struct router_scratch *")
    carve = parts.carve(lambda c_: c.router_carve(c_, part, tokens, scratch))
    c.router_carve(carve, part, tokens, scratch)
    ids, factors = ffi.new("int32_t[]", tokens * k), ffi.new("float[]", tokens * k)
    c.router_forward(parts.nn, part, weights, parts.input(x), scratch, ids, factors)
    for t in range(tokens):
        want, want_factors = route(router, x[t].astype(np.float64), *biases, k)
        assert list(ids[t * k : (t + 1) * k]) == want
        np.testing.assert_allclose(list(factors[t * k : (t + 1) * k]), want_factors, rtol=2e-6)


# -- attention of one head ---------------------------------------------------------------------


def attend(parts, q, k, v, scale, first, end, sink=None):
    ffi, c, dim = parts.ffi, parts.c, v.shape[1]
    keys = ffi.new("struct attend_keys *", {
        "k": parts.floats(k), "v": parts.floats(v), "ldk": k.shape[1], "ldv": dim,
        "k_dim": k.shape[1], "v_dim": dim, "scale": scale,
    })  # fmt: skip
    group = ffi.new("struct attend_group *")
    c.attend_begin(group, parts.floats(np.zeros(c.attend_floats(dim))), dim)
    query = parts.floats(q)
    c.attend_add(group, query, end)
    c.attend_range(parts.nn.k, keys, group, first)
    if sink is not None:
        c.attend_sink(parts.nn.k, sink, dim, group, 0)
    out = parts.floats(np.zeros(dim))
    c.attend_finish(group, 0, dim, out)
    return np.array(list(out), np.float32)


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 256), (0, 257), (3, 700), (255, 513), (600, 601)])
@pytest.mark.parametrize("sink", [None, -3.0, 40.0])
def test_attention_over_a_range(parts, first, end, sink):
    q = RNG.standard_normal(20).astype(np.float32)
    k, v = (RNG.standard_normal((701, n)).astype(np.float32) for n in (20, 12))
    got = attend(parts, q, k, v, 0.7, first, end, sink)
    score = k[first:end].astype(np.float64) @ q * np.float32(0.7)
    top = score.max() if sink is None else max(score.max(), sink)
    p = np.exp(score - top)
    total = p.sum() + (0 if sink is None else np.exp(sink - top))
    np.testing.assert_allclose(got, p / total @ v[first:end], rtol=2e-5, atol=1e-6)


def test_queries_of_a_group_end_where_they_end(parts):
    """Tokens of a chunk share their keys; each must give the bits it gives alone."""
    ffi, c, dim = parts.ffi, parts.c, 64
    q = RNG.standard_normal((8, 32)).astype(np.float32)
    k, v = (RNG.standard_normal((600, n)).astype(np.float32) for n in (32, dim))
    ends = [510, 511, 512, 513, 514, 515, 520, 256]
    keys = ffi.new("struct attend_keys *", {
        "k": parts.floats(k), "v": parts.floats(v), "ldk": 32, "ldv": dim, "k_dim": 32,
        "v_dim": dim, "scale": 0.2,
    })  # fmt: skip
    group = ffi.new("struct attend_group *")
    c.attend_begin(group, parts.floats(np.zeros(c.attend_floats(dim))), dim)
    queries = [parts.floats(row) for row in q]
    for query, end in zip(queries, ends):
        c.attend_add(group, query, end)
    c.attend_range(parts.nn.k, keys, group, 0)
    for i, end in enumerate(ends):
        out = parts.floats(np.zeros(dim))
        c.attend_finish(group, i, dim, out)
        alone = attend(parts, q[i], k, v, 0.2, 0, end)
        assert np.array(list(out), np.float32).tobytes() == alone.tobytes()


def test_keys_outside_the_range_do_not_matter(parts):
    q = RNG.standard_normal(8).astype(np.float32)
    k, v = RNG.standard_normal((2, 600, 8)).astype(np.float32)
    before = attend(parts, q, k, v, 0.3, 100, 500)
    k[:100], k[500:], v[:100], v[500:] = np.nan, np.nan, np.nan, np.nan
    assert attend(parts, q, k, v, 0.3, 100, 500).tobytes() == before.tobytes()


# -- the whole attention part --------------------------------------------------------------------

HIDDEN, HEADS, KV, DIM, CTX = 24, 4, 2, 8, 640


def run_attention(parts, x, cuts, **options) -> np.ndarray:
    """Output rows of attention over x [T, HIDDEN], evaluated in chunks that end at `cuts`."""
    ffi, c = parts.ffi, parts.c
    rng = np.random.default_rng(3)
    sparse = options.pop("sparse", None)
    part = ffi.new("struct attention_part *", {
        "heads": HEADS, "kv_heads": KV, "head_dim": DIM, "rope": {"half": 2, "scale": 1.0},
        "scale": DIM**-0.5, "norm_eps": 1e-6, **options,
    })  # fmt: skip
    if sparse:
        part.sparse = sparse
    w = ffi.new("struct attention_weights *")
    for name, rows in (("q", HEADS * DIM), ("k", KV * DIM), ("v", KV * DIM)):
        setattr(w, name, parts.matrix(rng.standard_normal((rows, HIDDEN)) / 3))
    w.o = parts.matrix(rng.standard_normal((HIDDEN, HEADS * DIM)) / 3)
    w.index_q = parts.matrix(rng.standard_normal((part.sparse.heads * 6 or 1, HIDDEN)))
    w.index_k = parts.matrix(rng.standard_normal((6, HIDDEN)))
    w.index_q_norm, w.index_k_norm = parts.floats(np.ones(6)), parts.floats(np.ones(6))
    w.sinks = parts.floats(rng.standard_normal(HEADS))
    frequency = np.array([1.0, 0.01])
    parts.kept.append(frequency)
    w.frequency = ffi.from_buffer("double[]", frequency)
    state = ffi.new("struct attention_state *", {"ctx": CTX})
    state.k, state.v = (parts.floats(np.zeros((KV, CTX, DIM))) for _ in range(2))
    state.index_raw, state.index_block = (parts.floats(np.zeros((CTX, 6))) for _ in range(2))
    y = parts.floats(np.zeros((len(x), HIDDEN)))
    start = 0
    for end in cuts:
        scratch = ffi.new("struct attention_scratch *")
        n = end - start
        carve = parts.carve(lambda c_, n=n, s=scratch: c.attention_carve(c_, part, CTX, n, 2, s))
        c.attention_carve(carve, part, CTX, n, 2, scratch)
        c.attention_forward(parts.nn, part, w, state, scratch, parts.input(x[start:end]), start,
                            y + start * HIDDEN, HIDDEN)
        start = end
    return np.array(list(y), np.float32).reshape(len(x), HIDDEN)


@pytest.mark.parametrize("options", [
    {}, {"window": 5}, {"sinks": True}, {"window": 300, "sinks": True},
    {"sparse": {"heads": 3, "dim": 6, "budget": 12, "block": 4}},
    {"sparse": {"heads": 3, "dim": 6, "budget": 300, "block": 3}, "sinks": True},
    {"sparse": {"heads": 1, "dim": 6, "budget": 2, "block": 1}},
], ids=str)  # fmt: skip
def test_the_cut_into_chunks_changes_no_bit(parts, options):
    x = np.random.default_rng(4).standard_normal((600, HIDDEN)).astype(np.float32)
    whole = run_attention(parts, x, [600], **options)
    for cuts in ([1, 2, 3, 300, 600], [5, 13, 257, 511, 600]):
        assert run_attention(parts, x, cuts, **options).tobytes() == whole.tobytes()


@pytest.mark.parametrize(("budget", "block"), [(64, 4), (60, 5), (256, 256)])
def test_selection_is_dense_below_its_budget(parts, budget, block):
    """With budget + block - 1 keys nothing is left out; one more key and something is."""
    x = np.random.default_rng(5).standard_normal((budget + block, HIDDEN)).astype(np.float32)
    last = len(x) - 1
    sparse = {"heads": 3, "dim": 6, "budget": budget, "block": block}
    dense, chosen = run_attention(parts, x, [len(x)]), run_attention(parts, x, [len(x)], sparse=sparse)
    assert chosen[:last].tobytes() == dense[:last].tobytes()
    assert np.abs(chosen[last] - dense[last]).max() > 1e-4


def test_a_window_sees_its_last_keys_only(parts):
    x = np.random.default_rng(6).standard_normal((40, HIDDEN)).astype(np.float32)
    other = x.copy()
    other[:30] = RNG.standard_normal((30, HIDDEN))
    a, b = (run_attention(parts, t, [40], window=8) for t in (x, other))
    assert a[37:].tobytes() == b[37:].tobytes()
    assert np.abs(a[36] - b[36]).max() > 1e-4
