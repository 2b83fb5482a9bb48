"""Records with biases: their place, their check, and what the converter writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from containers import CODEC_NUMBER, HEADER, edit_manifest, make_container, record, write_digests
from convert_helpers import IDS_ONLY, manifest, run
from headrace_tools.convert.preflight import record_layout
from headrace_tools.convert.safetensors_source import Checkpoint

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "gpt_oss"
CODECS = sorted(set(CODEC_NUMBER) - {"f64"})


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (64, 32), (33, 65), (130, 16)])
def test_the_layout_is_the_formats(codec, hidden, inner):
    rng = np.random.default_rng(0)
    wide, narrow = rng.standard_normal((2, inner, hidden)), rng.standard_normal((hidden, inner))
    biases = tuple(np.ones(n) for n in (inner, inner, hidden))
    for given in ((), biases):
        made = record(codec, 0, 0, *wide, narrow, given)
        (gate, up, down), bias, nbytes = record_layout(codec, hidden, inner, bool(given))
        assert HEADER.unpack(made[:64])[7:12] == (nbytes, gate, up, down, bias)
        assert len(made) == nbytes


@pytest.mark.parametrize("codec", CODECS)
def test_a_container_with_biases(tmp_path, headrace, codec):
    made = make_container(tmp_path / "m", hidden=40, inner=24, codec=codec, biased=True,
                          tokenizer=None)
    assert headrace.verify(made["path"]) == []
    with headrace.Model(made["path"], ctx=32) as model:
        with_biases = model.logits([1, 2, 3])
    plain = make_container(tmp_path / "p", hidden=40, inner=24, codec=codec, tokenizer=None)
    with headrace.Model(plain["path"], ctx=32) as model:
        assert np.abs(model.logits([1, 2, 3]) - with_biases).max() > 1e-3


@pytest.mark.parametrize("place", ["behind gate's", "behind up's", "behind down's", "a bias"])
def test_damage_around_the_biases_is_found(tmp_path, headrace, place):
    made = make_container(tmp_path / "m", hidden=40, inner=24, biased=True, tokenizer=None)
    path = tmp_path / "m" / "experts-0000.bin"
    data = bytearray(path.read_bytes())
    bias = HEADER.unpack(data[:64])[11]
    data[{"behind gate's": bias + 96, "behind up's": bias + 128 + 127,
          "behind down's": bias + 256 + 160, "a bias": bias + 5}[place]] ^= 1  # fmt: skip
    path.write_bytes(data)
    write_digests(tmp_path / "m")
    faults = headrace.verify(made["path"])
    assert any("CRC32C" in fault for fault in faults)
    assert any("padding" in fault for fault in faults) == (place != "a bias")


def test_biases_that_the_model_does_not_expect(tmp_path, headrace):
    made = make_container(tmp_path / "m", biased=True, tokenizer=None)
    edit_manifest(tmp_path / "m", lambda m: m["model"]["ffns"][0].update(expert_bias=False))
    with pytest.raises(headrace.HeadraceError, match="biases"):
        headrace.Model(made["path"])


def test_the_converter_writes_the_release_s_biases(tmp_path):
    """Every record of the fixture against one built from the source by the format's page."""
    assert run(FIXTURE, tmp_path / "m", "--experts", "bf16", "--trunk", "bf16", *IDS_ONLY) == 0
    source = Checkpoint.open(FIXTURE)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.concatenate([numbers, -numbers])

    def stored(name: str) -> np.ndarray:
        entry = source.tensors[name]
        read = source.read_stored if entry.dtype == "U8" else source.read_values
        return read(entry, 0, entry.elements).reshape(entry.shape)

    def experts(name: str) -> np.ndarray:
        blocks, scales = stored(f"{name}_blocks"), stored(f"{name}_scales")
        pairs = np.stack([numbers[blocks & 15], numbers[blocks >> 4]], -1)
        values = pairs.reshape(*blocks.shape[:-1], 32) * np.exp2(scales.astype(np.float32) - 127)[..., None]
        return values.reshape(*blocks.shape[:2], -1)

    for bank in manifest(tmp_path / "m")["experts"]:
        p = f"model.layers.{bank['layer']}.mlp.experts."
        both, down = experts(f"{p}gate_up_proj"), experts(f"{p}down_proj")
        both_bias, down_bias = stored(f"{p}gate_up_proj_bias"), stored(f"{p}down_proj_bias")
        data = (tmp_path / "m" / bank["file"]).read_bytes()
        assert bank["bias"] is True
        for expert in range(bank["experts"]):
            biases = both_bias[expert, 0::2], both_bias[expert, 1::2], down_bias[expert]
            wanted = record("bf16", bank["layer"], expert, both[expert, 0::2], both[expert, 1::2],
                            down[expert], biases)  # fmt: skip
            at = expert * bank["record_bytes"]
            assert data[at : at + bank["record_bytes"]] == wanted
