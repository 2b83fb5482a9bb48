"""A 4-bit source is kept as it is unless asked otherwise by name, and then the cost is shown."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from convert_helpers import IDS_ONLY, manifest, run, tree
from headrace_tools.convert import cli, codebooks, requantised, writer
from headrace_tools.convert.options import Options
from headrace_tools.convert.preflight import preflight
from headrace_tools.convert.quantise import decode, matrix_bytes

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SOURCE = FIXTURES / "gpt_oss"
NO_TOKENIZER = "--no-tokenizer"


@pytest.fixture(autouse=True)
def few_samples(monkeypatch, headrace):
    monkeypatch.setattr(codebooks, "_SAMPLES", 512)
    monkeypatch.setattr(cli, "_engine_verify", lambda: None)


@pytest.fixture(scope="module")
def native(headrace, tmp_path_factory):
    target = tmp_path_factory.mktemp("native") / "o"
    assert run(SOURCE, target, *IDS_ONLY) == 0
    return target


def expert_matrices(path: Path) -> list[np.ndarray]:
    """Every expert matrix of a container, gate, up and down in turn, float64."""
    books = np.zeros(0)
    found, described = [], manifest(path)
    if "codebooks" in described:
        books = np.fromfile(path / "codebooks.bin", np.uint8).reshape(len(described["experts"]), 3, -1)
    for i, bank in enumerate(described["experts"]):
        data = (path / bank["file"]).read_bytes()
        for expert in range(bank["experts"]):
            at = expert * bank["record_bytes"]
            shapes = ((bank["inner"], bank["hidden"]),) * 2 + ((bank["hidden"], bank["inner"]),)
            for kind, (start, shape) in enumerate(zip(struct.unpack_from("<3Q", data, at + 32), shapes)):
                size = matrix_bytes(bank["codec"], *shape)
                blob = np.frombuffer(data, np.uint8, size, at + start)
                if books.size:
                    quantizer = codebooks.quantizer(bank["codec"])
                    got = quantizer.decode(blob.copy(), *shape, books[i, kind].copy())
                else:
                    got = decode(bank["codec"], blob, *shape)
                found.append(got.astype(np.float64))
    return found


def size(path: Path) -> int:
    return sum(bank["experts"] * bank["record_bytes"] for bank in manifest(path)["experts"])


def test_the_source_decides_unless_asked_by_name(native, tmp_path, capsys):
    described = manifest(native)
    assert {bank["codec"] for bank in described["experts"]} == {"mxfp4"}
    assert requantised.KEY not in described["provenance"]
    assert described["provenance"]["options"]["experts"] == "auto"
    plain = FIXTURES / "qwen3_5_moe_eps"
    assert run(plain, tmp_path / "o", NO_TOKENIZER) == 0
    assert {bank["codec"] for bank in manifest(tmp_path / "o")["experts"]} == {"int8"}
    assert run(plain, tmp_path / "n", "--experts", "nl4", NO_TOKENIZER) == 0
    assert requantised.KEY not in manifest(tmp_path / "n")["provenance"]
    assert "costs" not in capsys.readouterr().err


@pytest.mark.parametrize("codec", ["int8", "nl4", "rvq2"])
def test_the_cost_is_measured_and_shown(native, tmp_path, capsys, codec):
    target = tmp_path / "o"
    assert run(SOURCE, target, "--experts", codec, NO_TOKENIZER, "--json") == 0
    said = capsys.readouterr()
    found = manifest(target)["provenance"][requantised.KEY]
    assert json.loads(said.out)[requantised.KEY] == found
    pairs = list(zip(expert_matrices(native), expert_matrices(target), strict=True))
    for kind, name in enumerate([*codebooks.KINDS, "all"]):
        some = pairs if name == "all" else pairs[kind::3]
        signal = sum(float((exact**2).sum()) for exact, _ in some)
        noise = sum(float(((exact - got) ** 2).sum()) for exact, got in some)
        assert found["snr_db"][name] == pytest.approx(10 * math.log10(signal / noise), abs=0.0051)
    assert (found["bytes"], found["native_bytes"]) == (size(target), size(native))
    assert f"{found['snr_db']['all']} dB" in said.err and "mxfp4 in the source" in said.err
    share = 10 ** (-found["snr_db"]["all"] / 20)
    assert f"{share:.1%} of their size" in said.err
    assert run(SOURCE, target, "--experts", codec, NO_TOKENIZER) == 0  # nothing to do: shown again
    assert f"{found['snr_db']['all']} dB" in capsys.readouterr().err


def test_the_plan_says_that_it_will_cost(tmp_path, capsys):
    assert run(SOURCE, tmp_path / "o", "--experts", "int8", "--plan", NO_TOKENIZER) == 0
    said = capsys.readouterr().out
    assert "mxfp4 in the source" in said and "--experts auto" in said and "costs" in said


def test_bf16_of_a_four_bit_source_costs_nothing(native, tmp_path):
    assert run(SOURCE, tmp_path / "o", "--experts", "bf16", *IDS_ONLY) == 0
    assert requantised.KEY not in manifest(tmp_path / "o")["provenance"]
    for exact, got in zip(expert_matrices(native), expert_matrices(tmp_path / "o"), strict=True):
        assert np.array_equal(exact, got)


def test_a_resumed_conversion_has_measured_the_same(tmp_path, monkeypatch):
    options = ("--experts", "int4", *IDS_ONLY)
    assert run(SOURCE, tmp_path / "whole", *options) == 0
    real, calls = writer.encode_record, []

    def dies(pre, bank, expert):
        calls.append(expert)
        if len(calls) > 20:
            raise KeyboardInterrupt
        return real(pre, bank, expert)

    monkeypatch.setattr(writer, "encode_record", dies)
    assert run(SOURCE, tmp_path / "o", *options) == 130
    monkeypatch.setattr(writer, "encode_record", real)
    assert run(SOURCE, tmp_path / "o", *options) == 0
    assert tree(tmp_path / "o") == tree(tmp_path / "whole")


def test_the_size_is_known_before(tmp_path):
    """What --budget counts with: the manifest says more than that of another source."""
    options = Options("nl4", tokenizer=False)
    most = writer.container_bytes(preflight(SOURCE, options))
    assert run(SOURCE, tmp_path / "o", "--experts", "nl4", "--hash-source", *IDS_ONLY) == 0
    made = sum(file.stat().st_size for file in (tmp_path / "o").iterdir())
    assert made <= most < made + 4096


@pytest.mark.parametrize("experts", [1, 3, 8, 9, 32, 60, 100, 385])
def test_the_measured_experts_are_spread_evenly(experts):
    spec = type("Spec", (), {"experts": experts})
    bank = type("Bank", (), {"spec": spec, "native": "mxfp4"})
    chosen = [e for e in range(experts) if requantised.is_measured(bank, e)]
    assert len(chosen) == min(experts, requantised.EXPERTS) and chosen[0] == 0
    steps = np.diff(chosen)
    assert not steps.size or steps.max() - steps.min() <= 1
    bank.native = None
    assert not any(requantised.is_measured(bank, e) for e in range(experts))
