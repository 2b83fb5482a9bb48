"""Quantised source tensors against the formulas of their specifications, number by number."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_tools.convert.decoders import (
    Fp8Blocks,
    Int4Packed,
    Mxfp4Blocks,
    Mxfp4Packed,
    decode_mxfp4,
    e4m3_table,
)
from headrace_tools.convert.errors import ConvertError
from headrace_tools.convert.families import ModelPlan, Piece, TensorSpec, whole
from headrace_tools.convert.families.common import open_config
from headrace_tools.convert.families.quantised import Codings
from headrace_tools.convert.safetensors_source import Checkpoint, NonFinite
from headrace_tools.convert.rows import read_numbers, read_rows

DTYPES = {"uint8": "U8", "int32": "I32", "float32": "F32", "uint16": "BF16", "int64": "I64"}


def checkpoint(directory: Path, tensors: dict[str, np.ndarray | tuple[str, np.ndarray]]):
    """A checkpoint of arrays; uint16 are bf16 bits, a pair names its dtype."""
    header, data = {}, b""
    for name, value in tensors.items():
        dtype, array = value if isinstance(value, tuple) else (DTYPES[value.dtype.name], value)
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    opened = Checkpoint.open(directory)
    assert not opened.faults
    return opened


def float32(value: Fraction) -> float:
    """Correctly rounded to float32: through float64 and back only when that is exact."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    best = min(abs(Fraction(float(f)) - value) for f in around)
    return float(
        next(
            f
            for f in sorted(around, key=lambda f: int(f.view(np.uint32)) & 1)
            if abs(Fraction(float(f)) - value) == best
        )
    )


def e4m3(byte: int) -> Fraction | None:
    """Sign, 4 exponent bits with bias 7, 3 fraction bits; all ones is NaN, there is no Inf."""
    sign, exponent, fraction = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return None
    if exponent:
        value = Fraction(8 + fraction, 8) * Fraction(2) ** (exponent - 7)
    else:
        value = Fraction(fraction, 8) / 64
    return -value if sign else value


def e2m1(nibble: int) -> Fraction:
    """Sign, 2 exponent bits with bias 1, 1 fraction bit."""
    sign, exponent, fraction = nibble >> 3, (nibble >> 1) & 3, nibble & 1
    if exponent:
        value = Fraction(2 + fraction, 2) * Fraction(2) ** (exponent - 1)
    else:
        value = Fraction(fraction, 2)
    return -value if sign else value


def test_every_e4m3_byte():
    table = e4m3_table()
    for byte in range(256):
        want = e4m3(byte)
        if want is None:
            assert np.isnan(table[byte])
        else:
            assert Fraction(float(table[byte])) == want
            assert np.signbit(table[byte]) == (byte >= 128)
    assert table[0x7E] == 448 and table[1] == 2.0**-9


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 20), st.integers(1, 20), st.integers(1, 7), st.integers(1, 9),
    st.booleans(), st.integers(0, 2**32 - 1), st.data(),
)  # fmt: skip
def test_fp8_blocks(tmp_path_factory, stack, rows, cols, block_rows, block_cols, wide, seed, data):
    rng = np.random.default_rng(seed)
    shape = (stack, rows, cols) if wide else (rows, cols)
    lead = shape[:-2]
    stored = rng.integers(0, 256, shape, dtype=np.uint8)
    stored[(stored & 0x7F) == 0x7F] = 0x11
    grid = (*lead, math.ceil(rows / block_rows), math.ceil(cols / block_cols))
    scales = (rng.normal(size=grid) * 2.0 ** rng.integers(-20, 20, grid)).astype(np.float32)
    source = checkpoint(
        tmp_path_factory.mktemp("fp8"),
        {"x.weight": ("F8_E4M3", stored), "x.weight_scale_inv": scales},
    )
    coding = Fp8Blocks(block_rows, block_cols)
    names = [t.name for t in coding.sources("x.weight", shape)]
    assert names == ["x.weight", "x.weight_scale_inv"]
    assert all(source.tensors[t.name].shape == t.shape for t in coding.sources("x.weight", shape))
    total = stored.size // cols
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - first))
    got = coding.rows(source, "x.weight", shape, first, count)
    assert got.dtype == np.float32 and got.shape == (count, cols)
    flat, flat_scales = stored.reshape(total, cols), scales.reshape(-1, *grid[-2:])
    for i in range(count):
        matrix, row = divmod(first + i, rows)
        for j in range(cols):
            scale = Fraction(float(flat_scales[matrix, row // block_rows, j // block_cols]))
            assert float(got[i, j]) == float32(e4m3(int(flat[first + i, j])) * scale)


def test_fp8_not_a_number_is_counted(tmp_path):
    stored = np.array([[0x7F, 0x01], [0x02, 0xFF]], dtype=np.uint8)
    source = checkpoint(
        tmp_path,
        {"x.weight": ("F8_E4M3", stored), "x.weight_scale_inv": np.ones((1, 1), np.float32)},
    )
    bad = NonFinite()
    pieces = whole("x.weight", (2, 2), coding=Fp8Blocks(128, 128))
    values = read_rows(source, pieces, 0, 2, bad)
    assert (bad.nan, bad.inf) == (2, 0)
    np.testing.assert_array_equal(values, np.array([[0, 2**-9], [2**-8, 0]], np.float32))


def mxfp4_value(nibble: int, scale: int) -> float:
    return float(e2m1(nibble) * Fraction(2) ** (scale - 127))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 2**32 - 1), st.data())
def test_mxfp4_packed(tmp_path_factory, rows, half, seed, data):
    rng = np.random.default_rng(seed)
    cols = 2 * half
    packed = rng.integers(0, 256, (rows, half), dtype=np.uint8)
    scales = rng.integers(0, 252, (rows, math.ceil(cols / 32)), dtype=np.uint8)
    source = checkpoint(
        tmp_path_factory.mktemp("mx"), {"w.weight_packed": packed, "w.weight_scale": scales}
    )
    coding = Mxfp4Packed()
    for wanted in coding.sources("w.weight_packed", (rows, cols)):
        assert source.tensors[wanted.name].shape == wanted.shape
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - first))
    got = coding.rows(source, "w.weight_packed", (rows, cols), first, count)
    for i in range(count):
        for j in range(cols):
            byte = int(packed[first + i, j // 2])
            nibble = byte >> 4 if j % 2 else byte & 15
            assert float(got[i, j]) == mxfp4_value(nibble, int(scales[first + i, j // 32]))


def test_mxfp4_extremes_are_exact_and_fit_bf16():
    """Scale 0 gives subnormal numbers; every finite value is a bf16 number; -0 keeps its sign."""
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for scale in (0, 1, 127, 200, 251):
        values = decode_mxfp4(packed, np.full((16, 1), scale, np.uint8), 32)
        assert np.isfinite(values).all()
        assert not (values.view(np.uint32) & 0xFFFF).any()
        want = [[mxfp4_value((int(b) >> 4 * k) & 15, scale) for b in row for k in (0, 1)]
                for row in packed]  # fmt: skip
        np.testing.assert_array_equal(values.astype(np.float64), want)
    minus = decode_mxfp4(np.full((1, 16), 0x08, np.uint8), np.array([[7]], np.uint8), 32)
    assert np.signbit(minus[0, 0]) and not np.signbit(minus[0, 1])


def test_mxfp4_overflow_is_counted_as_infinite(tmp_path):
    packed = np.full((1, 16), 0x77, np.uint8)
    source = checkpoint(
        tmp_path, {"w.weight_packed": packed, "w.weight_scale": np.array([[254]], np.uint8)}
    )
    bad = NonFinite()
    read_rows(source, whole("w.weight_packed", (1, 32), coding=Mxfp4Packed()), 0, 1, bad)
    assert bad.inf == 32


def test_mxfp4_scale_255_is_refused(tmp_path):
    scales = np.full((3, 2), 127, np.uint8)
    scales[2, 1] = 255
    source = checkpoint(
        tmp_path, {"w.weight_packed": np.zeros((3, 32), np.uint8), "w.weight_scale": scales}
    )
    coding = Mxfp4Packed()
    coding.rows(source, "w.weight_packed", (3, 64), 0, 2)
    with pytest.raises(ConvertError, match=r"w\.weight_scale.*255.*row 0, group 1"):
        coding.rows(source, "w.weight_packed", (3, 64), 2, 1)


def test_mxfp4_blocks(tmp_path):
    rng = np.random.default_rng(3)
    experts, rows, groups = 3, 5, 2
    blocks = rng.integers(0, 256, (experts, rows, groups, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, (experts, rows, groups), dtype=np.uint8)
    source = checkpoint(tmp_path, {"w_blocks": blocks, "w_scales": scales})
    coding, shape = Mxfp4Blocks(), (experts, rows, groups * 32)
    for wanted in coding.sources("w_blocks", shape):
        assert source.tensors[wanted.name].shape == wanted.shape
    got = coding.rows(source, "w_blocks", shape, 4, 7).reshape(7, groups, 32)
    for i in range(7):
        expert, row = divmod(4 + i, rows)
        for g in range(groups):
            for j in range(32):
                byte = int(blocks[expert, row, g, j // 2])
                nibble = byte >> 4 if j % 2 else byte & 15
                assert float(got[i, g, j]) == mxfp4_value(nibble, int(scales[expert, row, g]))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 80), st.sampled_from([1, 8, 32, 33]), st.booleans(),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_int4_packed(tmp_path_factory, rows, cols, group, bf16, seed):
    rng = np.random.default_rng(seed)
    words = math.ceil(cols / 8)
    packed = rng.integers(-(2**31), 2**31, (rows, words)).astype(np.int32)
    wide = rng.normal(size=(rows, math.ceil(cols / group))).astype(np.float32)
    bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
    stored = bits if bf16 else wide
    scales = (bits.astype(np.uint32) << 16).view(np.float32) if bf16 else wide
    source = checkpoint(
        tmp_path_factory.mktemp("int4"),
        {
            "w.weight_packed": packed,
            "w.weight_scale": stored,
            "w.weight_shape": np.array([rows, cols], np.int64),
        },
    )
    coding = Int4Packed(group)
    for wanted in coding.sources("w.weight_packed", (rows, cols)):
        assert source.tensors[wanted.name].shape == wanted.shape
        assert source.tensors[wanted.name].dtype in wanted.dtypes
    got = coding.rows(source, "w.weight_packed", (rows, cols), 0, rows)
    for i in range(rows):
        for j in range(cols):
            word = int(packed[i, j // 8]) & 0xFFFFFFFF
            nibble = (word // 16 ** (j % 8)) % 16
            scale = Fraction(float(scales[i, j // group]))
            assert float(got[i, j]) == float32((nibble - 8) * scale)


def test_int4_contradicting_shape_is_refused(tmp_path):
    source = checkpoint(
        tmp_path,
        {
            "w.weight_packed": np.zeros((2, 4), np.int32),
            "w.weight_scale": np.ones((2, 1), np.float32),
            "w.weight_shape": np.array([2, 31], np.int32),
        },
    )
    with pytest.raises(ConvertError, match=r"\[2, 31\].*\[2, 32\]"):
        Int4Packed(32).rows(source, "w.weight_packed", (2, 32), 0, 2)


# -- rows of pieces --------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_pieces_pick_their_rows(tmp_path_factory, data, seed):
    """Any grouping, order and range against plain indexing."""
    rng = np.random.default_rng(seed)
    total, cols = data.draw(st.integers(1, 400)), 3
    values = rng.normal(size=(total, cols)).astype(np.float32)
    source = checkpoint(tmp_path_factory.mktemp("rows"), {"x": values})
    pieces, want = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        groups = data.draw(st.integers(1, min(5, total)))
        stride = total // groups
        rows = data.draw(st.integers(1, stride))
        first = data.draw(st.integers(0, stride - rows))
        order = tuple(rng.permutation(rows).tolist()) if data.draw(st.booleans()) else ()
        pieces.append(Piece("x", (total, cols), cols, first, rows, groups, stride, order))
        for g in range(groups):
            run = values[first + g * stride : first + g * stride + rows]
            want.append(run[list(order)] if order else run)
    expected = np.concatenate(want)
    start = data.draw(st.integers(0, len(expected) - 1))
    count = data.draw(st.integers(1, len(expected) - start))
    got = read_rows(source, tuple(pieces), start, count, NonFinite())
    np.testing.assert_array_equal(got, expected[start : start + count])
    numbers = read_numbers(source, tuple(pieces), NonFinite())
    np.testing.assert_array_equal(numbers, expected.reshape(-1))


def test_only_the_rows_asked_for_count_as_bad(tmp_path):
    values = np.zeros((8, 2), np.float32)
    values[::2] = np.nan
    source = checkpoint(tmp_path, {"x": values})
    bad = NonFinite()
    odd = Piece("x", (8, 2), 2, 1, 1, 4, 2)
    read_rows(source, (odd,), 0, 4, bad)
    assert not bad
    read_rows(source, (Piece("x", (8, 2), 2, 0, 1, 4, 2),), 0, 4, bad)
    assert bad.nan == 8


# -- quantization_config ---------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
       "weight_block_size": [64, 32]}  # fmt: skip


def packed_config(packing: str, **weights: object) -> dict[str, object]:
    values = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16,
              "symmetric": True, "dynamic": False, "actorder": None}  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**values, **weights}}},
    }


def codings(config: dict[str, object] | None) -> tuple[Codings, list[str]]:
    plan = ModelPlan("test")
    readers = open_config({"quantization_config": config}, plan)
    assert readers is not None
    return Codings.read(readers), plan.faults


def test_understood_configs():
    assert codings(None) == (Codings(), [])
    made, faults = codings(FP8)
    assert made.fp8 == Fp8Blocks(64, 32) and not faults
    assert any("dynamic FP8 activations" in note for note in made.notes)
    made, faults = codings(packed_config("pack-quantized"))
    assert made.packed == Int4Packed(16) and not faults
    made, faults = codings(
        packed_config("mxfp4-pack-quantized", type="float", group_size=32, scale_dtype="torch.uint8")
    )
    assert made.packed == Mxfp4Packed() and not faults
    made, faults = codings({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert made.blocks == Mxfp4Blocks() and not faults


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({**FP8, "weight_block_size": None}, "weight_block_size"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [128, 0]}, "weight_block_size"),
        ({**FP8, "fmt": "e5m2"}, "fmt"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme"),
        ({**FP8, "rotation": "hadamard"}, "rotation"),
        (packed_config("pack-quantized", symmetric=False), "symmetric"),
        (packed_config("pack-quantized", num_bits=8), "num_bits"),
        (packed_config("pack-quantized", actorder="group"), "actorder"),
        (packed_config("pack-quantized", strategy="channel"), "strategy"),
        (packed_config("pack-quantized", group_size=None), "group_size"),
        (packed_config("pack-quantized", zero_offset=1), "zero_offset"),
        (packed_config("mxfp4-pack-quantized", type="int", group_size=32), "type"),
        (packed_config("mxfp4-pack-quantized", type="float", group_size=16), "group_size"),
        (packed_config("nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        ({**packed_config("pack-quantized"), "config_groups": {}}, "config_groups"),
        ({**packed_config("pack-quantized"), "transform_config": {"r": 1}}, "transform_config"),
    ],
)
def test_other_configs_are_refused_by_name(config, named):
    _, faults = codings(config)
    assert faults and any(named in fault for fault in faults), faults


def test_coded_pieces_follow_the_checkpoint(tmp_path):
    """FP8 by dtype, packed by name; plain tensors stay plain."""
    source = checkpoint(
        tmp_path,
        {
            "a.weight": ("F8_E4M3", np.zeros((2, 4), np.uint8)),
            "b.weight": np.zeros((2, 4), np.float32),
        },
    )
    made, _ = codings(FP8)
    plan = ModelPlan("test")
    for name in "ab":
        plan.tensors.append(TensorSpec(name, 2, 4, "matrix", whole(f"{name}.weight", (2, 4))))
    made.apply(plan, source.tensors)
    a, b = (spec.pieces[0] for spec in plan.tensors)
    assert a.coding == Fp8Blocks(64, 32) and b.coding is None
    assert [t.name for t in a.sources()] == ["a.weight", "a.weight_scale_inv"]
