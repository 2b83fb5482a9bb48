"""Containers with rvq experts: codebooks.bin is checked, and the model is the one it describes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import rvq_model
from containers import crc32c, edit_manifest, make_container, record, write_digests
from store_tools import FORMAT, Container, StoreError
from support import kernel_data as data

SIZES = {"layers": 3, "experts": 4, "hidden": 96, "inner": 80, "dense": (1,), "codec": "bf16"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, tuple[Path, dict]]:
    """codec -> (container, weights of its experts)"""
    found = {}
    for codec in rvq_model.SHAPES:
        made = make_container(tmp_path_factory.mktemp(codec) / "c", tokenizer=None, **SIZES)
        found[codec] = Path(made["path"]), rvq_model.replace_experts(made, codec)
    return found


@pytest.fixture
def copied(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals["rvq3x256"][0], tmp_path / "c"))


def verify(lib, path: Path) -> list[str]:
    """The faults that hr_verify reports."""
    ffi, c = lib
    faults: list[str] = []

    @ffi.callback("hr_verify_fn")
    def report(_user, fault, text, _done, _total):
        if fault:
            faults.append(ffi.string(text).decode())
        return 0

    status = c.hr_verify(str(path).encode(), report, ffi.NULL, ffi.NULL)
    assert (status == 0) == (not faults)
    return faults


def damage(path: Path, at: int, repair: bool) -> None:
    """Flips a bit of codebooks.bin; with `repair` the manifest and the digests agree to it."""
    raw = bytearray((path / "codebooks.bin").read_bytes())
    raw[at] ^= 1
    (path / "codebooks.bin").write_bytes(raw)
    if repair:
        edit_manifest(path, lambda m: m["codebooks"].update(crc32c=crc32c(bytes(raw))))


@pytest.mark.parametrize("codec", rvq_model.SHAPES)
def test_a_good_container(lib, originals, codec):
    path, _ = originals[codec]
    with Container(lib, path) as container:
        banks = [container.p.banks[i] for i in range(container.p.bank_count)]
        assert [b.codec for b in banks] == [rvq_model.SHAPES[codec][0]] * 2
        assert all(b.books != lib[0].NULL for b in banks)
        assert container.p.codebooks_bytes == (path / "codebooks.bin").stat().st_size
    assert verify(lib, path) == []


def refused(lib, path: Path) -> str:
    with pytest.raises(StoreError) as failure:
        Container(lib, path)
    assert failure.value.code == FORMAT
    return failure.value.detail


def test_damage_to_the_codebooks_is_named(lib, copied):
    set_bytes = 64 + 3 * 256 * 8
    damage(copied, 4 * set_bytes + 100, repair=False)  # layer 2, up
    assert "codebooks.bin: its CRC32C" in refused(lib, copied)
    faults = verify(lib, copied)
    assert any("CRC32C" in f for f in faults) and any("SHA-256" in f for f in faults)


def test_damage_behind_good_checksums_is_named(lib, copied):
    set_bytes = 64 + 3 * 256 * 8
    damage(copied, 4 * set_bytes + 100, repair=True)
    assert "layer 2, up" in refused(lib, copied)
    assert any("layer 2, up" in f for f in verify(lib, copied))


@pytest.mark.parametrize("change,words", [
    (lambda m: m.pop("codebooks"), '"codebooks" is missing'),
    (lambda m: m["codebooks"].update(bytes=1), "the banks' codecs make"),
    (lambda m: m["codebooks"].update(file="other.bin"), "codebooks.bin"),
    (lambda m: m["codebooks"].update(crc32c=-1), "crc32c"),
    (lambda m: m["codebooks"].update(more=1), "more"),
    (lambda m: m["experts"][0].update(codec="rvq4x64"), "codebooks"),
    (lambda m: m["experts"][0].update(codec="rvq2x256"), "record_bytes"),
    (lambda m: m["trunk"]["tensors"][0].update(codec="rvq4x64"), "experts only"),
], ids=["missing", "bytes", "file", "crc", "key", "shape", "size", "trunk"])
def test_manifests_that_do_not_fit(lib, copied, change, words):
    edit_manifest(copied, lambda m: [change(m), None][1])
    assert words in refused(lib, copied)


def test_a_file_of_another_length(lib, copied):
    raw = (copied / "codebooks.bin").read_bytes()
    (copied / "codebooks.bin").write_bytes(raw[:-1])
    write_digests(copied)
    assert "codebooks.bin: has" in refused(lib, copied)
    (copied / "codebooks.bin").unlink()
    write_digests(copied)
    with pytest.raises(StoreError):
        Container(lib, copied)


def test_codebooks_that_nobody_needs(lib, tmp_path):
    made = make_container(tmp_path / "c", tokenizer=None, **SIZES)
    entry = {"file": "codebooks.bin", "bytes": 1, "crc32c": 0}
    edit_manifest(Path(made["path"]), lambda m: m.update(codebooks=entry))
    assert "no bank" in refused(lib, tmp_path / "c")


def logits(headrace, path: Path, ids: list[int], **options) -> np.ndarray:
    with headrace.Model(path, **options) as model:
        return model.logits(ids)


@pytest.mark.parametrize("codec", rvq_model.SHAPES)
def test_the_model_is_that_of_the_decoded_weights(lib, headrace, originals, tmp_path, codec):
    """Same bits for every ISA, chunk and thread count; close to float32 records of the weights."""
    path, weights = originals[codec]
    plain = make_container(tmp_path / "plain", tokenizer=None, **(SIZES | {"codec": "f32"}))
    for bank in plain["manifest"]["experts"]:
        records = [record("f32", bank["layer"], e, *weights[bank["layer"], e])
                   for e in range(bank["experts"])]
        (tmp_path / "plain" / bank["file"]).write_bytes(b"".join(records))
        bank["crc32c"] = [int.from_bytes(r[60:64], "little") for r in records]
    edit_manifest(tmp_path / "plain", lambda m: m.update(experts=plain["manifest"]["experts"]))
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 96, 12)]
    found = [logits(headrace, path, ids, isa=kernels.isa, chunk=chunk, threads=threads)
             for kernels in data.tables(*lib) for chunk, threads in ((0, 1), (1, 2), (7, 2))]
    assert all(np.array_equal(found[0], other) for other in found[1:])
    want = logits(headrace, tmp_path / "plain", ids)
    # Activations are rounded to 8 bits, and a route may flip: most logits are close.
    assert np.median(np.abs(found[0] - want)) < 0.02 * want.std()
