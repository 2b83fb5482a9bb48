"""The n-gram rows on disk: their file, its damage, resuming, and the plan of the real model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sparse_flash_next
from containers import crc32c, edit_manifest, write_digests
from convert_helpers import IDS_ONLY, manifest, measured, run
from headrace_tools.convert.row_table import encode_pages
from headrace_tools.crc32c import crc32c_rows

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "qwen4_exp"
PAGE, PER_PAGE = 4096, 4084 // 8  # the fixture's rows: four bf16 numbers


@pytest.fixture
def model(tmp_path):
    assert run(FIXTURE, tmp_path / "model", "--experts", "bf16", "--trunk", "bf16", *IDS_ONLY) == 0
    return tmp_path / "model"


def test_the_rows_lie_in_pages_as_the_format_says(model):
    data = (model / "ngram.bin").read_bytes()
    described = manifest(model)["model"]["ngram"]
    (site,) = described["sites"]
    assert len(data) == -(-described["rows"] // PER_PAGE) * PAGE and described["codec"] == "bf16"
    raw = (FIXTURE / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    stem = "model.layers.1.ple.ple_embedding."
    rows = b""
    for shard in range(2):
        begin, end = header[f"{stem}ngram_embedding.shard_{shard}.weight"]["data_offsets"]
        rows += raw[8 + length + begin : 8 + length + end]
    for number in range(len(data) // PAGE):
        page = data[number * PAGE :][:PAGE]
        part = rows[number * PER_PAGE * 8 :][: PER_PAGE * 8]
        assert page[: len(part)] == part and not any(page[len(part) : 4084])
        assert int.from_bytes(page[4084:4092], "little") == number
        assert int.from_bytes(page[4092:], "little") == crc32c(page[:4092])
    begin, _ = header[f"{stem}layer_multipliers"]["data_offsets"]
    stored = np.frombuffer(raw, "<i8", 3, 8 + length + begin)
    assert site["multipliers"] == stored.tolist() and site["layer"] == 1


@pytest.mark.parametrize(("rows", "dim", "codec"), [(1, 3, "f32"), (12, 160, "bf16"), (25, 160, "bf16")])
def test_pages(rows, dim, codec):
    per_page = 4084 // (dim * (4 if codec == "f32" else 2))
    values = np.arange(rows * dim, dtype=np.float32).reshape(rows, dim)
    pages = encode_pages(codec, values, 7, per_page)
    assert pages.shape == (-(-rows // per_page), PAGE)
    for number, page in enumerate(pages, 7):
        assert int.from_bytes(page[4084:4092].tobytes(), "little") == number
        assert int.from_bytes(page[4092:].tobytes(), "little") == crc32c(page[:4092].tobytes())


@pytest.mark.parametrize("width", [0, 1, 7, 8, 9, 4092])
def test_checksums_of_rows(width):
    data = np.random.default_rng(width).integers(0, 256, (5, width), dtype=np.uint8)
    assert crc32c_rows(data).tolist() == [crc32c(row.tobytes()) for row in data]


@pytest.mark.parametrize("at", [0, 5000, PAGE + 4084, 2 * PAGE - 1])
def test_damage_is_found_and_located(model, headrace, at):
    path = model / "ngram.bin"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    write_digests(model)
    (fault,) = headrace.verify(model)
    assert f"page {at // PAGE} (byte {at // PAGE * PAGE}" in fault and "rows" in fault
    with headrace.Model(model, ctx=64) as opened:
        with pytest.raises(headrace.HeadraceError, match=f"page at offset {at // PAGE * PAGE}"):
            opened.logits(np.arange(64) % 131)


def test_padding_that_is_not_zero(model, headrace):
    path = model / "ngram.bin"
    data = bytearray(path.read_bytes())
    page = data[-PAGE:]
    page[4083] = 1
    page[4092:] = crc32c(bytes(page[:4092])).to_bytes(4, "little")
    data[-PAGE:] = page
    path.write_bytes(data)
    write_digests(model)
    assert any("padding and not zero" in fault for fault in headrace.verify(model))


@pytest.mark.parametrize("change", ["short", "long", "missing", "unlisted"])
def test_a_file_of_another_length(model, headrace, change):
    path = model / "ngram.bin"
    data = path.read_bytes()
    if change == "missing":
        path.unlink()
    elif change != "unlisted":
        path.write_bytes(data[:-PAGE] if change == "short" else data + bytes(PAGE))
    lines = (model / "manifest.sha256").read_text().splitlines(keepends=True)
    if change == "unlisted":
        (model / "manifest.sha256").write_text("".join(x for x in lines if "ngram" not in x))
    assert any("ngram.bin" in fault for fault in headrace.verify(model))
    if change != "unlisted":
        with pytest.raises(headrace.HeadraceError, match="ngram.bin"):
            headrace.Model(model)


BAD_MANIFESTS = [
    ({"rows": 0}, "rows"), ({"rows": 1 << 41}, "rows"), ({"rows": 511}, "parameters"),
    ({"rows": 1 << 40}, "ngram.bin"), ({"dim": 0}, "dim"), ({"dim": 2000}, "dim"),
    ({"dim": 5}, "ngram.bin|shape"), ({"codec": "int8"}, "codec"), ({"codec": "f32"}, "ngram.bin"),
    ({"order": 1}, "order"), ({"order": 4}, "multipliers"), ({"heads": 200}, "heads"),
    ({"eos": -1}, "eos"), ({"conv_taps": 9}, "conv_taps"), ({"dilation": 0}, "dilation"),
    ({"sites": []}, "sites"), ({"sites": [{}]}, "layer"), ({"extra": 1}, "extra"),
    ({"layer": 1}, "layer"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_MANIFESTS, ids=lambda x: str(x)[:30])
def test_descriptions_that_cannot_be(model, headrace, change, message):
    edit_manifest(model, lambda m: m["model"]["ngram"].update(change))
    with pytest.raises(headrace.HeadraceError, match=message):
        headrace.Model(model, ctx=64)


@pytest.mark.parametrize("change", [{"layer": 4}, {"primes": [53] * 7}, {"multipliers": [1, 2, -3]},
                                    {"offsets": [0] * 7 + [500]}, {"primes": [0] + [53] * 7}])
def test_sites_that_cannot_be(model, headrace, change):
    edit_manifest(model, lambda m: m["model"]["ngram"]["sites"][0].update(change))
    with pytest.raises(headrace.HeadraceError, match="sites"):
        headrace.Model(model, ctx=64)


def test_sites_ascend(model, headrace):
    edit_manifest(model, lambda m: m["model"]["ngram"]["sites"].append(m["model"]["ngram"]["sites"][0]))
    with pytest.raises(headrace.HeadraceError, match="layer 1 does not follow layer 1"):
        headrace.Model(model, ctx=64)


def test_an_interrupted_conversion_keeps_the_rows(tmp_path, headrace):
    """The journal is put back as it was just after ngram.bin, the last file."""
    target = tmp_path / "model"
    assert run(FIXTURE, target, *IDS_ONLY) == 0
    whole = {f.name: f.read_bytes() for f in target.iterdir()}
    records = []
    for name in sorted(whole):
        if name.endswith(".bin"):
            crc = json.loads(whole["manifest.json"])
            record = {"kind": "file", "name": name, "bytes": len(whole[name])}
            record["sha256"] = next(
                line.split()[0] for line in whole["manifest.sha256"].decode().splitlines()
                if line.endswith(name)
            )  # fmt: skip
            if name.startswith("experts"):
                record["crc32c"] = crc["experts"][int(name[8:12])]["crc32c"]
            elif name == "trunk.bin":
                record["crc32c"] = crc["trunk"]["crc32c"]
            records.append(record)
    from headrace_tools.convert import writer
    from headrace_tools.convert.options import Options
    from headrace_tools.convert.preflight import preflight

    pre = preflight(FIXTURE, Options(tokenizer=False))
    start = {"kind": "start", "version": 1, "converter": writer.CONVERTER,
             "options": pre.options.as_dict(), "source": pre.identity}  # fmt: skip
    for name in ("manifest.json", "manifest.sha256"):
        (target / name).unlink()
    log = "".join(json.dumps(line, sort_keys=True) + "\n" for line in [start, *records])
    (target / "conversion.log").write_text(log)
    before = (target / "ngram.bin").stat().st_mtime_ns
    assert run(FIXTURE, target, *IDS_ONLY) == 0
    assert (target / "ngram.bin").stat().st_mtime_ns == before
    assert {f.name: f.read_bytes() for f in target.iterdir()} == whole


def rewrite(source: Path, target: Path, name: str, values: np.ndarray) -> Path:
    """A copy of a one-file checkpoint with the bytes of one tensor replaced."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    raw[8 + length + begin : 8 + length + end] = values.tobytes()
    path.write_bytes(raw)
    return target


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("ngram_heads_vocab_sizes", [0] + [53] * 7, "does not lie in its 552 rows"),
        ("ngram_heads_offsets", [0] * 7 + [500], "does not lie in its 552 rows"),
        ("layer_multipliers", [1, -3, 5], "negative -3"),
    ],
)
def test_impossible_hash_numbers_are_refused(tmp_path, capsys, name, values, message):
    tensor = f"model.layers.1.ple.ple_embedding.{name}"
    source = rewrite(FIXTURE, tmp_path / "source", tensor, np.array(values, "<i8"))
    assert run(source, tmp_path / "model", *IDS_ONLY) == 3
    error = capsys.readouterr().err
    assert message in error and tensor.rsplit(".", 1)[0] in error
    assert not (tmp_path / "model").exists()


# -- the real model ----------------------------------------------------------------------------


def test_the_plan_of_the_real_model(tmp_path):
    """Counts as published; in minutes and 2 GiB at most, from headers alone."""
    source = sparse_flash_next.write(tmp_path / "flash-next")
    done, seconds, peak = measured([source, "--plan", "--json", "--no-tokenizer"])
    assert done.returncode == 0 and seconds < 300 and peak < 2 << 30
    plan = json.loads(done.stdout)
    rows = sparse_flash_next.ROWS * sparse_flash_next.ROW
    assert plan["source_tensors"] == 1658
    assert round((plan["parameters"] - rows) / 1e9, 2) == 125.74
    assert round(rows / 1e9, 2) == 51.20 and round(plan["parameters"] / 1e9, 2) == 176.94
    assert plan["source_bytes"]["experts"] == sparse_flash_next.EXPERT_BYTES
    assert plan["source_bytes"]["ngram"] == sparse_flash_next.NGRAM_BYTES
    assert plan["source_bytes"]["text"] == 2 * (plan["parameters"] - rows) - (
        sparse_flash_next.EXPERT_BYTES
    )
    assert plan["skipped"]["vision"]["tensors"] == 333 and plan["skipped"]["mtp"]["tensors"] == 31
    assert plan["files"]["ngram.bin"] == -(-sparse_flash_next.ROWS // 12) * 4096
    assert not plan["faults"]


def test_a_lost_shard_of_the_real_model_is_named(tmp_path):
    source = sparse_flash_next.write(tmp_path / "flash-next")
    (source / "model-00002-of-00080.safetensors").unlink()
    assert run(source, "--plan", "--no-tokenizer") == 3
