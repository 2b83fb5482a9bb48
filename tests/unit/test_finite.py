"""Scales and weights that are no numbers: counted, named and refused although every checksum agrees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import FIXTURES
from containers import crc32c, edit_manifest
from convert_helpers import IDS_ONLY, manifest, run

MODEST = settings(max_examples=60, deadline=None)
CHOICES = {"int8": "int8", "mxfp4": "mxfp4", "int4": "int4", "nl4": "nl4", "rvq3": "rvq4x64",
           "bf16": "bf16", "f32": "f32"}
"""--experts -> codec"""

WIDTHS = {"mxfp4": 1, "int4": 2, "nl4": 2, "int8": 4, "rvq4x64": 2, "rvq2x256": 2, "bf16": 2,
          "f32": 4, "f64": 8}
SIGNLESS = ("int8", "rvq4x64", "rvq2x256")


def padded(n: int) -> int:
    return -(-n // 64) * 64


def number_offsets(codec: str, rows: int, cols: int, size: int) -> np.ndarray:
    """Byte offsets in a blob of `size` bytes of all numbers that must be finite: formats/codecs.md."""
    width = WIDTHS[codec]
    if codec in ("mxfp4", "int4", "nl4"):
        panels, groups = padded(rows) // 64, padded(cols) // 32
        panel = groups * (64 * width + 1024)
        inside = np.arange(groups * 64) * width
        return (np.arange(panels)[:, None] * panel + inside).ravel()
    if codec in SIGNLESS:
        return np.arange(padded(rows)) * width
    return np.arange(0, size, width)


def bad_bytes(codec: str, which: int) -> bytes:
    """NaN, infinity, or what else is not allowed, as the codec stores it."""
    if codec == "mxfp4":
        return b"\xff"
    value = (np.nan, np.inf, -np.inf)[which % 3]
    if codec in SIGNLESS and which == 3:
        value = -1.0
    if WIDTHS[codec] == 2:
        return np.array([value], "<f4").tobytes()[2:]
    return np.array([value], "<f8" if codec == "f64" else "<f4").tobytes()


@MODEST
@given(data=st.data(), codec=st.sampled_from(sorted(WIDTHS)), rows=st.integers(1, 150),
       cols=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
def test_scan_finds_what_is_there_in_any_pieces(lib, data, codec, rows, cols, seed):
    ffi, c = lib
    rng = np.random.default_rng(seed)
    size = ffi.new("size_t *")
    number = c.codec_from_name(codec.encode())
    assert c.codec_matrix_bytes(number, rows, cols, size)
    blob = np.full(size[0], 255, np.uint8)  # what is no number may be anything
    offsets, width = number_offsets(codec, rows, cols, size[0]), WIDTHS[codec]
    for at in offsets:
        blob[at : at + width] = 0
    planted = rng.choice(offsets, min(len(offsets), int(rng.integers(0, 4))), replace=False)
    for at in planted:
        blob[at : at + width] = np.frombuffer(bad_bytes(codec, int(rng.integers(0, 4))), np.uint8)
    piece = data.draw(st.sampled_from([64, 192, 4096, 1 << 20]))
    out = ffi.new("struct unfit *")
    for at in range(0, len(blob), piece):
        part = blob[at : at + piece].copy()
        c.finite_scan(number, rows, cols, at, ffi.cast("void *", part.ctypes.data), len(part), out)
    assert out.count == len(planted)
    if len(planted):
        assert out.first == planted.min()


@pytest.fixture(scope="module")
def containers(tmp_path_factory):
    """Callable: choice of --experts -> a good container of that codec, made once."""
    base, done = tmp_path_factory.mktemp("finite"), {}

    def container(experts: str) -> Path:
        if experts not in done:
            done[experts] = base / experts
            assert run(FIXTURES / "olmoe", done[experts], "--experts", experts, "--trunk", "bf16",
                       *IDS_ONLY) == 0
        return done[experts]

    return container


def write_signed(path: Path, bank: int, expert: int, record: bytearray) -> None:
    """Puts a record back with checksums that agree to it."""
    entry = manifest(path)["experts"][bank]
    record[60:64] = bytes(4)
    crc = crc32c(bytes(record))
    record[60:64] = crc.to_bytes(4, "little")
    file = path / entry["file"]
    data = bytearray(file.read_bytes())
    size = entry["record_bytes"]
    data[expert * size : (expert + 1) * size] = record
    file.write_bytes(data)
    edit_manifest(path, lambda m: m["experts"][bank]["crc32c"].__setitem__(expert, crc))


@pytest.mark.parametrize("experts", CHOICES)
def test_a_record_with_a_number_that_is_none(experts, containers, tmp_path, headrace):
    codec = CHOICES[experts]
    path = Path(shutil.copytree(containers(experts), tmp_path / "c"))
    bank = manifest(path)["experts"][0]
    assert bank["codec"] == codec
    size = bank["record_bytes"]
    data = (path / bank["file"]).read_bytes()
    want = {}
    for expert in range(bank["experts"]):  # whichever is chosen first is refused
        record = bytearray(data[expert * size : (expert + 1) * size])
        part = expert % 3
        start = int.from_bytes(record[32 + 8 * part : 40 + 8 * part], "little")
        at = start + WIDTHS[codec] * (3 + expert)
        for place in (at, at + 5 * WIDTHS[codec]):
            raw = bad_bytes(codec, expert % 3)
            record[place : place + len(raw)] = raw
        write_signed(path, 0, expert, record)
        want[expert] = (("gate", "up", "down")[part], expert * size + at)
    faults = headrace.verify(path)
    assert len(faults) == len(want)
    noun = "weight" if codec in ("bf16", "f32") else "scale"
    for expert, (part, at) in want.items():
        found = [f for f in faults if f"layer {bank['layer']} expert {expert} " in f]
        assert len(found) == 1
        assert f"2 numbers that must be finite are not, the first is a {noun} of {part} at byte {at} " in found[0]
    with headrace.Model(path, ctx=64) as model, pytest.raises(headrace.HeadraceError) as caught:
        model.logits([1, 2, 3])
    if noun == "scale":  # refused when it is read
        assert "must be finite" in str(caught.value) and "expert" in str(caught.value)
    else:
        assert "not finite" in str(caught.value) and f"layer {bank['layer']}" in str(caught.value)


def test_a_trunk_tensor_with_a_number_that_is_none(containers, tmp_path, headrace):
    path = Path(shutil.copytree(containers("int8"), tmp_path / "c"))
    trunk = manifest(path)["trunk"]
    entry = next(t for t in trunk["tensors"] if t["name"] == "layers.1.attn.k")
    assert entry["codec"] == "bf16"
    data = bytearray((path / "trunk.bin").read_bytes())
    places = [entry["offset"] + 2 * i for i in (7, 8, 30)]
    for place in places:
        data[place : place + 2] = b"\x80\xff"  # minus infinity
    (path / "trunk.bin").write_bytes(data)
    chunk = trunk["chunk"]
    sums = [crc32c(bytes(data[i : i + chunk])) for i in range(0, len(data), chunk)]
    edit_manifest(path, lambda m: m["trunk"].update(crc32c=sums))
    assert headrace.verify(path) == [
        'trunk.bin: tensor "layers.1.attn.k": 3 numbers that must be finite are not, the first is a '
        f"weight at byte {places[0]} of the file"]


def test_biases_are_scanned(tmp_path, headrace, fixture_models):
    path = Path(shutil.copytree(fixture_models("gpt_oss", "auto"), tmp_path / "c"))
    bank = json.loads((path / "manifest.json").read_text())["experts"][1]
    size = bank["record_bytes"]
    record = bytearray((path / bank["file"]).read_bytes()[2 * size : 3 * size])
    bias = int.from_bytes(record[56:60], "little")
    at = bias + padded(bank["inner"] * 4)  # of up, behind that of gate
    record[at : at + 4] = np.array([np.inf], "<f4").tobytes()
    write_signed(path, 1, 2, record)
    (fault,) = headrace.verify(path)
    assert f"layer {bank['layer']} expert 2 " in fault and "a weight of the bias of up" in fault
    assert f"at byte {2 * size + at} " in fault
