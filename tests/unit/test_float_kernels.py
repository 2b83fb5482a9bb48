"""Float kernels: every ISA has the bits of the reference, and the reference is the mathematics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import kernel_data as data

SEEDS = st.integers(0, 2**32 - 1)
FLAVOURS = st.sampled_from(data.FLAVOURS)
LENGTHS = st.integers(1, 100)
MODEST = settings(max_examples=40, deadline=None)
EPS = np.finfo(np.float32).eps


@pytest.fixture(scope="module")
def tables(lib):
    return data.tables(*lib)


def on_all(tables, call):
    """call(kernels) on every table; asserts equal bits and returns the reference's results."""
    *others, reference = tables
    want = call(reference)
    for kernels in others:
        got = call(kernels)
        for name, a, b in zip(range(len(want)), got, want, strict=True):
            assert data.same_bits(np.atleast_1d(np.float32(a)), np.atleast_1d(np.float32(b))), (
                f"{kernels.isa}: result {name}")
    return want


def close(got, want, magnitude=None, terms: float = 1.0) -> None:
    """|got - want| within `terms` rounding errors of `magnitude` (default |want|)."""
    want = np.asarray(want, np.float64)
    bound = EPS * terms * (np.abs(want) if magnitude is None else np.asarray(magnitude)) + 1e-44
    assert np.all(np.abs(np.asarray(got, np.float64) - want) <= bound)


def test_tables_and_names(lib, tables):
    ffi, c = lib
    assert c.kernels_find(b"auto").isa == tables[0].table.isa
    assert c.kernels_reference() == c.kernels_find(b"reference")
    assert c.kernels_find(b"") == ffi.NULL and c.kernels_find(b"sse9") == ffi.NULL
    cpu = c.cpu_features()
    have = {kernels.isa for kernels in tables}
    assert ("avx2" in have) == cpu.avx2 and ("avx512" in have) == cpu.avx512
    assert ("neon" in have) == cpu.neon


@MODEST
@given(seed=SEEDS, n=LENGTHS, flavour=FLAVOURS)
def test_reductions(tables, seed, n, flavour):
    rng = np.random.default_rng(seed)
    a, b = data.floats(rng, (2, n), flavour)

    def call(kernels):
        p, q, table = kernels.pointer(a), kernels.pointer(b), kernels.table
        return table.dot(p, q, n), table.sum(p, n), table.max(p, n)

    with np.errstate(over="ignore", invalid="ignore"):
        dot, total, largest = on_all(tables, call)
    assert largest == a.max()
    if flavour in ("normal", "zeros", "signed_zero"):
        a64, b64 = a.astype(np.float64), b.astype(np.float64)
        close(dot, a64 @ b64, np.abs(a64) @ np.abs(b64), 4 + n / 16)
        close(total, a64.sum(), np.abs(a64).sum(), 4 + n / 16)


def lanes_model(a: np.ndarray, b: np.ndarray) -> np.float32:
    """The 16-lane dot product with exact products (float64 holds the product and one addition
    of small integers exactly), to pin the order of additions."""
    lanes = np.zeros(16, np.float32)
    for start in range(0, len(a), 16):
        part = a[start : start + 16].astype(np.float64) * b[start : start + 16].astype(np.float64)
        lanes[: len(part)] = (lanes[: len(part)].astype(np.float64) + part).astype(np.float32)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


@MODEST
@given(seed=SEEDS, n=st.integers(1, 200))
def test_order_of_the_sixteen_lanes(tables, seed, n):
    rng = np.random.default_rng(seed)
    # 12-bit factors of moderate range: float64 rounds neither the product nor the sum.
    a, b = (rng.integers(-4095, 4096, (2, n)) * 2.0 ** rng.integers(-8, 9, (2, n))).astype(np.float32)
    for kernels in tables:
        assert kernels.table.dot(kernels.pointer(a), kernels.pointer(b), n) == lanes_model(a, b)
        ones = np.ones(n, np.float32)
        assert kernels.table.sum(kernels.pointer(a), n) == lanes_model(a, ones)


@MODEST
@given(seed=SEEDS, n=LENGTHS, bad=st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38]))
def test_all_finite(tables, seed, n, bad):
    rng = np.random.default_rng(seed)
    a = data.floats(rng, n, "mixed")
    for kernels in tables:
        assert kernels.table.all_finite(kernels.pointer(a), n)
    a[rng.integers(n)] = bad
    for kernels in tables:
        assert kernels.table.all_finite(kernels.pointer(a), n) == bool(np.isfinite(bad))


@MODEST
@given(seed=SEEDS, n=LENGTHS, flavour=FLAVOURS)
def test_elementwise(tables, seed, n, flavour):
    rng = np.random.default_rng(seed)
    x, y = data.floats(rng, (2, n), flavour)
    factor = np.float32(rng.standard_normal())

    def in_place(kernels, name, *args):
        out = np.append(y, np.float32(77))
        getattr(kernels.table, name)(kernels.pointer(out), *args, n)
        assert out[n] == 77
        return out[:n]

    added, scaled, combined, gated = on_all(tables, lambda k: (
        in_place(k, "add", k.pointer(x)), in_place(k, "scale", factor),
        in_place(k, "axpy", factor, k.pointer(x)), in_place(k, "sigmoid_mul", k.pointer(x))))
    with np.errstate(all="ignore"):
        assert data.same_bits(added, y + x) and data.same_bits(scaled, y * factor)
    close(combined, np.float64(factor) * x + y.astype(np.float64), np.abs(y) + np.abs(factor * x))
    gate = 1 / (1 + np.exp(-np.clip(x.astype(np.float64), -700, 700)))
    close(gated, y * gate, np.abs(y) * np.maximum(gate, 1e-37), 4)


@MODEST
@given(seed=SEEDS, n=LENGTHS, flavour=FLAVOURS, linear=st.sampled_from([0.0, 15.0]))
def test_gated_products(tables, seed, n, flavour, linear):
    g, u = data.floats(np.random.default_rng(seed), (2, n), flavour)
    alpha, limit, beta = np.float32(1.702), np.float32(7.0), np.float32(4.0)

    def call(kernels):
        y, z = np.full((2, n), 7, np.float32)
        kernels.table.situ_mul(kernels.pointer(y), kernels.pointer(g), kernels.pointer(u), n, beta,
                               linear)
        kernels.table.clamped_mul(kernels.pointer(z), kernels.pointer(g), kernels.pointer(u), n,
                                  alpha, limit)
        return y, z

    y, z = on_all(tables, call)
    g64, u64 = g.astype(np.float64), u.astype(np.float64)

    def sigmoid(x):
        return 1 / (1 + np.exp(-np.clip(x, -700, 700)))

    up = linear * np.tanh(u64 / linear) if linear else u64
    close(y, beta * np.tanh(g64 / beta) * sigmoid(g64) * up,
          beta * np.maximum(sigmoid(g64), 1e-37) * np.abs(up), 12)
    gate, up = np.minimum(g64, limit), np.clip(u64, -limit, limit)
    close(z, (up + 1) * gate * sigmoid(alpha * gate),
          (np.abs(up) + 1) * np.abs(gate) * np.maximum(sigmoid(alpha * gate), 1e-37) *
          (1 + np.abs(gate).clip(0, 90)), 12)


@MODEST
@given(seed=SEEDS, n=LENGTHS, flavour=FLAVOURS)
def test_norms(tables, seed, n, flavour):
    rng = np.random.default_rng(seed)
    x, w = data.floats(rng, (2, n), flavour)
    eps, mul = np.float32(1e-6), np.float32(0.25)

    def call(kernels):
        y, z = np.full((2, n), 7, np.float32)
        kernels.table.rms_norm(kernels.pointer(x), kernels.pointer(w), n, eps, kernels.pointer(y))
        kernels.table.l2_norm(kernels.pointer(x), n, eps, mul, kernels.pointer(z))
        same = x.copy()
        kernels.table.rms_norm(kernels.pointer(same), kernels.pointer(w), n, eps,
                               kernels.pointer(same))
        assert data.same_bits(same, y)
        return y, z

    y, z = on_all(tables, call)
    if flavour in ("normal", "zeros", "signed_zero"):
        x64 = x.astype(np.float64)
        close(y, x64 / np.sqrt((x64**2).mean() + eps) * w, None, 8 + n / 16)
        close(z, x64 * mul / np.sqrt((x64**2).sum() + eps), None, 8 + n / 16)


@MODEST
@given(seed=SEEDS, n=LENGTHS, flavour=FLAVOURS)
def test_softmax(tables, seed, n, flavour):
    x = data.floats(np.random.default_rng(seed), n, flavour)

    def call(kernels):
        y = x.copy()
        kernels.table.softmax(kernels.pointer(y), n)
        return (y,)

    (y,) = on_all(tables, call)
    x64 = x.astype(np.float64)
    want = np.exp(x64 - x64.max())
    # The difference x - max is rounded first; that error grows with it.
    close(y, want / want.sum(), (want + 1e-37) / want.sum(), 8 + n / 16 + (x64.max() - x64).clip(0, 200))


@MODEST
@given(seed=SEEDS, rows=st.integers(1, 11), k=st.integers(1, 70), n=st.integers(1, 9),
       bf16=st.booleans(), indexed=st.booleans(), flavour=FLAVOURS)
def test_rows(tables, seed, rows, k, n, bf16, indexed, flavour):
    rng = np.random.default_rng(seed)
    w = data.floats(rng, (rows, k), flavour)
    stored = np.ascontiguousarray(w.view(np.uint16)[:, 1::2]) if bf16 else w
    if bf16:
        w = (stored.astype(np.uint32) << 16).view(np.float32)
    x = data.floats(rng, (n, k + int(rng.integers(0, 3))), "normal")
    index = rng.integers(0, n, rng.integers(1, 12)).astype(np.uint32) if indexed else None
    r0 = int(rng.integers(0, rows))
    r1 = int(rng.integers(r0, rows + 1))

    def call(kernels):
        y = kernels.rows(stored, x, index, r0, r1, rows + 2)
        assert np.all(y[:, :r0] == -1) and np.all(y[:, r1:] == -1)
        return (y,)

    (y,) = on_all(tables, call)
    reference = tables[-1]
    for i, row in enumerate(x if index is None else x[index]):
        for r in range(r0, r1):
            dot = reference.table.dot(reference.pointer(np.ascontiguousarray(w[r])),
                                      reference.pointer(np.ascontiguousarray(row[:k])), k)
            assert data.same_bits(y[i, r : r + 1], np.array([dot], np.float32))


def attention_block(kernels, q, keys, k, v, k_dim, v_dim, scale):
    """m, l [queries] and acc [queries, v_dim] of one block; q [queries, k_dim], k [n, ldk], v [n, ldv]."""
    count = len(q)
    a = kernels.ffi.new("struct attn_queries *")
    p, acc = np.zeros((count, 256), np.float32), np.full((count, v_dim + 1), 7, np.float32)
    rows = [np.ascontiguousarray(row) for row in q]
    a.count, a.p = count, kernels.pointer(p)
    for i in range(count):
        a.q[i], a.keys[i], a.acc[i] = kernels.pointer(rows[i]), keys[i], kernels.pointer(acc[i])
    kernels.table.attn_block(a, kernels.pointer(k), k.shape[1], kernels.pointer(v), v.shape[1],
                             k_dim, v_dim, scale)
    assert (acc[:, v_dim] == 7).all()
    return (np.array(list(a.m)[:count], np.float32), np.array(list(a.l)[:count], np.float32),
            acc[:, :v_dim].copy())


@MODEST
@given(seed=SEEDS, n=st.integers(1, 256), k_dim=st.integers(1, 70),
       v_dim=st.integers(1, 150) | st.sampled_from((64, 128)), count=st.integers(1, 8), flavour=FLAVOURS)
def test_attention_block(tables, seed, n, k_dim, v_dim, count, flavour):
    rng = np.random.default_rng(seed)
    q = data.floats(rng, (count, k_dim), flavour)
    k, v = data.floats(rng, (n, k_dim + 3), flavour), data.floats(rng, (n, v_dim + 2), flavour)
    keys = np.maximum(1, n - rng.integers(0, 6, count) * rng.integers(0, 20))
    scale = np.float32(1 / math.sqrt(k_dim))
    m, total, acc = on_all(tables, lambda t: attention_block(t, q, keys, k, v, k_dim, v_dim, scale))
    for i in range(count):
        alone = attention_block(tables[0], q[i : i + 1], keys[i : i + 1], k, v, k_dim, v_dim, scale)
        for together, single in zip((m, total, acc), alone):
            assert data.same_bits(together[i : i + 1], single)
        if flavour not in ("normal", "zeros"):
            continue
        s = k[: keys[i], :k_dim].astype(np.float64) @ q[i] * scale
        p = np.exp(s - s.max())
        close(m[i : i + 1], s.max(), np.abs(s).max() + 1, 30)
        close(total[i : i + 1], p.sum(), None, 60)
        close(acc[i], p @ v[: keys[i], :v_dim], p @ np.abs(v[: keys[i], :v_dim]), 100)



@MODEST
@given(seed=SEEDS, v_dim=LENGTHS, cut=st.integers(1, 63))
def test_attention_merge_equals_one_block(tables, seed, v_dim, cut):
    rng = np.random.default_rng(seed)
    q, k, v = (data.floats(rng, s, "normal") for s in ((1, 16), (64, 16), (64, v_dim)))

    def merged(kernels):
        m, total, acc = attention_block(kernels, q, [cut], k[:cut], v[:cut], 16, v_dim, 0.5)
        m2, total2, acc2 = attention_block(kernels, q, [64 - cut], k[cut:], v[cut:], 16, v_dim, 0.5)
        kernels.table.attn_merge(kernels.pointer(m), kernels.pointer(total), kernels.pointer(acc),
                                 m2[0], total2[0], kernels.pointer(acc2), v_dim)
        return m, total, acc[0]

    m, total, acc = on_all(tables, merged)
    whole_m, whole_total, (whole,) = attention_block(tables[-1], q, [64], k, v, 16, v_dim, 0.5)
    assert m[0] == whole_m[0]
    close(total, whole_total, None, 20)
    close(acc, whole, np.abs(whole) + whole_total, 40)


def test_attention_merge_into_nothing(tables):
    """The state before the first block is m = -inf, l = 0, acc = 0."""
    acc2 = np.arange(5, dtype=np.float32)
    for kernels in tables:
        m, total = np.array([-np.inf], np.float32), np.zeros(1, np.float32)
        acc = np.zeros(5, np.float32)
        kernels.table.attn_merge(kernels.pointer(m), kernels.pointer(total), kernels.pointer(acc),
                                 -3.0, 2.0, kernels.pointer(acc2), 5)
        assert m[0] == -3 and total[0] == 2 and np.array_equal(acc, acc2)


@MODEST
@given(seed=SEEDS, k_dim=st.integers(1, 40), v_dim=st.integers(1, 140), per_channel=st.booleans(),
       flavour=FLAVOURS)
def test_delta_step(tables, seed, k_dim, v_dim, per_channel, flavour):
    rng = np.random.default_rng(seed)
    state = data.floats(rng, (k_dim, v_dim), flavour)
    k, q = data.floats(rng, (2, k_dim), "normal") / np.float32(math.sqrt(k_dim))
    v = data.floats(rng, v_dim, flavour)
    decay = rng.random(k_dim if per_channel else 1).astype(np.float32)
    beta = np.float32(rng.random())

    def call(kernels):
        s, d, o = state.copy(), np.full(v_dim, 7, np.float32), np.full(v_dim, 7, np.float32)
        kernels.table.delta_step(kernels.pointer(s), k_dim, v_dim, kernels.pointer(decay),
                                 int(per_channel), kernels.pointer(k), kernels.pointer(q),
                                 kernels.pointer(v), beta, kernels.pointer(d), kernels.pointer(o))
        return s, d, o

    s, d, o = on_all(tables, call)
    if flavour in ("normal", "zeros"):
        s64 = state.astype(np.float64) * decay[:, None]
        d64 = beta * (v - k @ s64)
        after = s64 + np.outer(k, d64)
        size = np.abs(s64).max(initial=0) * k_dim + np.abs(v).max() + 1
        close(s, after, size, 20)
        close(d, d64, size, 20)
        close(o, q @ after, size * k_dim, 20)


@MODEST
@given(seed=SEEDS, taps=st.integers(1, 8), channels=LENGTHS, flavour=FLAVOURS)
def test_conv_silu(tables, seed, taps, channels, flavour):
    rng = np.random.default_rng(seed)
    w, x = data.floats(rng, (2, taps, channels), flavour)

    def call(kernels):
        y = np.full(channels, 7, np.float32)
        rows = kernels.ffi.new("float *[]", [kernels.pointer(row) for row in x])
        kernels.table.conv_silu(kernels.pointer(w), rows, taps, channels, kernels.pointer(y))
        return (y,)

    (y,) = on_all(tables, call)
    if flavour in ("normal", "zeros"):
        z = (w.astype(np.float64) * x).sum(axis=0)
        close(y, z / (1 + np.exp(-z)), np.abs(w * x).sum(axis=0) + np.abs(z) * 4, 20)
