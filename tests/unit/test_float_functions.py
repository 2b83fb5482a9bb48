"""exp, sigmoid, softplus, silu over the float line; sin and cos of rotary angles."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support import kernel_data as data

BLOCK = 1 << 20
SMALLEST = 2.0**-149


@pytest.fixture(scope="module")
def tables(lib):
    return data.tables(*lib)


def float_line(step: int, first: int = 0, end: int = 2**32) -> Iterator[np.ndarray]:
    """Every step-th float32 in the order of its bits, NaN and infinities included."""
    for start in range(first, end, BLOCK * step):
        bits = np.arange(start, min(start + BLOCK * step, end), step, dtype=np.uint64)
        yield bits.astype(np.uint32).view(np.float32)


def exp64(x: np.ndarray) -> np.ndarray:
    return np.exp(x.astype(np.float64))


def sigmoid64(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x.astype(np.float64)))
    return np.where(x < 0, e, 1.0) / (1 + e)


def softplus64(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def silu64(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) * sigmoid64(x)


TRUTH = {"exp": exp64, "sigmoid": sigmoid64, "softplus": softplus64, "silu": silu64,
         "tanh": lambda x: np.tanh(x.astype(np.float64))}


def worst_ulp(got: np.ndarray, want: np.ndarray) -> float:
    """Largest error in units of the last place of the correctly rounded result."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.abs(want).astype(np.float32)
        finite = np.isfinite(rounded)
        assert np.array_equal(np.isfinite(got) | np.isnan(want), finite | np.isnan(want)), (
            "overflow at another place")
        ulp = np.maximum(np.spacing(rounded[finite]).astype(np.float64), SMALLEST)
        return float((np.abs(got[finite] - want[finite]) / ulp).max(initial=0))


def block_error(tables, name: str, x: np.ndarray) -> float:
    """Bits of every ISA against each other on x; returns the worst error in ulp."""
    y = tables[0].elementwise(name, x)
    for other in tables[1:]:
        assert data.same_bits(other.elementwise(name, x), y), (name, other.isa)
    skip = np.isnan(x)
    assert np.all(np.isnan(y[skip]))
    if name == "silu":  # relative precision ends where sigmoid becomes subnormal
        skip |= x < -86
    with np.errstate(all="ignore"):
        return worst_ulp(y[~skip], TRUTH[name](x[~skip]))


def sweep(tables, name: str, blocks: Iterator[np.ndarray]) -> float:
    """The worst error in ulp over all blocks. Two threads: the kernels run without Python's lock."""
    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(lambda x: block_error(tables, name, x), blocks))


@pytest.mark.parametrize("name,limit", [("exp", 1.1), ("sigmoid", 1.6)])
def test_sample_of_the_float_line(tables, name, limit):
    assert sweep(tables, name, float_line(61)) <= limit


@pytest.mark.parametrize("name,limit", [("softplus", 2.2), ("silu", 2.0), ("tanh", 2.0)])
def test_thin_sample_of_the_float_line(tables, name, limit):
    assert sweep(tables, name, float_line(509)) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("name", ["exp", "sigmoid"])
def test_blocks_of_the_float_line(tables, name, part):
    """Every float32 of every fourth block of the line, on the vector tables: all the same bits, and on
    a quarter of these the error in ulp. The plain table, fifty times slower, is compared on the
    sample above."""
    vector_tables = tables[:-1] or tables
    step, eighth = 2**22, 2**29
    blocks = range(part * eighth + part % 4 * step, (part + 1) * eighth, 4 * step)

    def check(first: int) -> None:
        x = np.arange(first, first + step, dtype=np.uint32).view(np.float32)
        if first // step // 4 % 4 == 0:
            assert block_error(vector_tables, name, x) <= 2.0
            return
        y = vector_tables[0].elementwise(name, x)
        for other in vector_tables[1:]:
            assert data.same_bits(other.elementwise(name, x), y), (name, other.isa, first)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, blocks))


def test_ends_of_the_range(tables):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 88.7228, 88.73, -103.97, -103.98, 1e38],
                 np.float32)
    for kernels in tables:
        y = kernels.elementwise("exp", x)
        assert y[0] == 1 and y[1] == 1 and y[2] == np.inf and y[3] == 0 and np.isnan(y[4])
        assert 3.4e38 < y[5] < np.inf and y[6] == np.inf and y[9] == np.inf
        assert y[7] == np.float32(SMALLEST) and y[8] == 0
        y = kernels.elementwise("sigmoid", x)
        assert y[0] == y[1] == 0.5 and y[2] == 1 and y[3] == 0 and np.isnan(y[4])
        y = kernels.elementwise("softplus", x)
        assert y[2] == np.inf and y[3] == 0 and np.isnan(y[4]) and y[9] == x[9]
        big = np.linspace(20.001, 1e6, 1000).astype(np.float32)
        assert np.array_equal(kernels.elementwise("softplus", big), big)


@pytest.mark.parametrize("n", range(1, 34))
def test_every_tail_length(tables, n):
    rng = np.random.default_rng(n)
    x, u = data.floats(rng, (2, n + 1), "normal")
    for kernels in tables:
        for name in TRUTH:
            y = np.full(n + 1, 7, np.float32)
            getattr(kernels.table, name)(kernels.pointer(y), kernels.pointer(x), n)
            assert y[n] == 7
            assert data.same_bits(y[:n], kernels.elementwise(name, x)[:n])
        gated = kernels.elementwise("silu_mul", x, u)
        assert data.same_bits(gated, kernels.elementwise("silu", x) * u)


def sincos(lib, angle: float) -> tuple[float, float]:
    ffi, c = lib
    sine, cosine = ffi.new("float *"), ffi.new("float *")
    c.sincos_exact(angle, sine, cosine)
    return sine[0], cosine[0]


def test_sincos_of_rotary_angles(lib):
    rng = np.random.default_rng(11)
    frequency = 10000.0 ** (-rng.random(3000))
    angles = np.concatenate([
        rng.integers(0, 2**21, 3000) * frequency, rng.uniform(-(2.0**31), 2.0**31, 4000),
        np.arange(-2000, 2001) * (np.pi / 4), 2.0 ** rng.uniform(-60, 31, 2000), [0.0]])
    for angle in angles:
        sine, cosine = sincos(lib, float(angle))
        for got, want in ((sine, np.sin(angle)), (cosine, np.cos(angle))):
            assert abs(got - want) <= 0.501 * np.spacing(np.float32(abs(want))), angle


def test_sincos_keeps_signs_and_survives_nonsense(lib):
    assert sincos(lib, 0.0) == (0.0, 1.0)
    assert sincos(lib, -1.5)[0] == -sincos(lib, 1.5)[0]
    for nonsense in (np.nan, np.inf, -np.inf):
        assert all(np.isnan(value) for value in sincos(lib, nonsense))
    sincos(lib, 1e300)
