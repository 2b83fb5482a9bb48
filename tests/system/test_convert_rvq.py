"""headrace-convert --experts rvq3 and rvq2: the experts are what the library encodes, resumed or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from convert_helpers import IDS_ONLY, manifest, run, tree
from headrace_tools.convert import cli, codebooks, writer
from headrace_tools.crc32c import crc32c

ROOT = Path(__file__).resolve().parents[2]
SOURCE = sorted(p.parent for p in (ROOT / "tests" / "fixtures").glob("qwen3_5_moe*/oracle.json"))[0]


@pytest.fixture(autouse=True)
def few_samples(monkeypatch, headrace):
    """The engine of this build, and codebooks of little data."""
    monkeypatch.setattr(codebooks, "_SAMPLES", 1024)
    monkeypatch.setattr(cli, "_engine_verify", lambda: None)


def convert(target: Path, experts: str, *more: str) -> int:
    return run(SOURCE, target, "--experts", experts, *more, *IDS_ONLY)


def expert(path: Path, bank: dict, e: int) -> bytes:
    with open(path / bank["file"], "rb") as file:
        file.seek(e * bank["record_bytes"])
        return file.read(bank["record_bytes"])


@pytest.mark.parametrize("experts,codec,least", [("rvq3", "rvq4x64", 14), ("rvq3x256", "rvq3x256", 14),
                                                 ("rvq2", "rvq2x256", 9)])
def test_experts_are_close_to_the_source(headrace, tmp_path, experts, codec, least):
    from headrace.quant import Quantizer

    assert convert(tmp_path / "c", experts) == 0
    assert convert(tmp_path / "plain", "f32") == 0
    got, plain = manifest(tmp_path / "c"), manifest(tmp_path / "plain")
    raw = (tmp_path / "c" / "codebooks.bin").read_bytes()
    assert got["codebooks"] == {"file": "codebooks.bin", "bytes": len(raw), "crc32c": crc32c(raw)}
    books = np.frombuffer(raw, np.uint8).reshape(len(got["experts"]), 3, -1)
    quantizer = Quantizer(codec)
    for bank, exact, sets in zip(got["experts"], plain["experts"], books, strict=True):
        assert bank["codec"] == codec
        record = expert(tmp_path / "c", bank, 1)
        source = expert(tmp_path / "plain", exact, 1)
        offsets = np.frombuffer(record[32:56], "<u8"), np.frombuffer(source[32:56], "<u8")
        shapes = [(bank["inner"], bank["hidden"])] * 2 + [(bank["hidden"], bank["inner"])]
        for at, from_at, shape, own in zip(*offsets, shapes, sets, strict=True):
            size = quantizer.blob_bytes(*shape)
            blob = np.frombuffer(record, np.uint8)[int(at) : int(at) + size].copy()
            w = np.frombuffer(source[int(from_at) :], "<f4", shape[0] * shape[1]).reshape(shape)
            assert quantizer.sqnr(w, blob, own.copy()) > least
            assert np.array_equal(blob, quantizer.encode(w, own.copy()))
    headrace.verify(tmp_path / "c")
    with headrace.Model(tmp_path / "c") as model:
        assert np.isfinite(model.logits([1, 2, 3])).all()


def test_a_resumed_conversion_writes_the_same_bytes(tmp_path, monkeypatch):
    assert convert(tmp_path / "whole", "rvq3") == 0
    real, calls = writer.encode_record, []

    def dies(pre, bank, e):
        calls.append(e)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return real(pre, bank, e)

    monkeypatch.setattr(writer, "encode_record", dies)
    assert convert(tmp_path / "c", "rvq3") != 0
    assert (tmp_path / "c" / "codebooks.bin").exists()
    monkeypatch.setattr(writer, "encode_record", real)
    shutil.copytree(tmp_path / "c", tmp_path / "other")
    assert convert(tmp_path / "other", "rvq3", "--effort", "high") != 0  # other bytes: refused
    assert convert(tmp_path / "c", "rvq3") == 0
    assert tree(tmp_path / "c") == tree(tmp_path / "whole")


def test_effort_is_recorded_where_it_matters(tmp_path):
    assert convert(tmp_path / "c", "rvq2", "--effort", "greedy") == 0
    assert manifest(tmp_path / "c")["provenance"]["options"]["effort"] == "greedy"
    assert convert(tmp_path / "plain", "int8") == 0
    assert "effort" not in manifest(tmp_path / "plain")["provenance"]["options"]


def test_the_plan_knows_the_size(tmp_path, capsys):
    assert run(SOURCE, tmp_path / "c", "--plan", "--json", "--experts", "rvq3", *IDS_ONLY) == 0
    report = json.loads(capsys.readouterr().out)
    assert convert(tmp_path / "c", "rvq3") == 0
    sizes = {f.name: f.stat().st_size for f in (tmp_path / "c").iterdir()}
    assert "codebooks.bin" in json.dumps(report) and str(sizes["codebooks.bin"]) in json.dumps(report)
