"""headrace-convert on bad checkpoints: refused before a byte is written, everything named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from convert_helpers import IDS_ONLY, manifest, run, trunk_tensor
from headrace_tools.convert import cli
from headrace_tools.convert.errors import ConvertError
from headrace_tools.convert.quantise import decode_bf16
from headrace_tools.convert.safetensors_source import Checkpoint, NonFinite, read_header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoint import (
    bf16_bits,
    random_weights,
    split_experts,
    text_config,
    write_checkpoint,
    write_safetensors,
)


@pytest.fixture(autouse=True)
def without_engine(monkeypatch):
    monkeypatch.setattr(cli, "_engine_verify", lambda: None)


def refused(source: Path, tmp_path: Path, capsys, *options: str) -> str:
    """Converting fails with exit code 3 and leaves nothing; returns the message."""
    target = tmp_path / "refused"
    capsys.readouterr()
    assert run(source, target, *IDS_ONLY, *options) == 3
    assert not target.exists()
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


# ---- the safetensors files ----


def test_truncated_shard(tmp_path, capsys):
    """B01: file, tensor, needed and present bytes."""
    source = write_checkpoint(tmp_path / "m", weights=split_experts(random_weights(text_config())))
    path = source / "model.safetensors"
    size = path.stat().st_size
    entries = read_header(path, path.name)[1]
    last = max(entries, key=lambda e: e.offset)
    os.truncate(path, size - 10)
    message = refused(source, tmp_path, capsys)
    assert str(path) in message and repr(last.name) in message
    assert f"needs {last.nbytes} bytes" in message and f"{last.nbytes - 10} are present" in message
    os.truncate(path, size - 24576)
    message = refused(source, tmp_path, capsys)
    cut = [e.name for e in entries if e.offset + e.nbytes > size - 24576]
    assert len(cut) > 1 and all(repr(name) in message for name in cut)
    assert "missing" not in message


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_FILES = {
    "too few bytes": ({"t": entry("F32", [1000, 1000], 0, 4)}, bytes(4), "takes 4000000 bytes"),
    "end before begin": ({"t": entry("F32", [1], 8, 4)}, bytes(8), "end 4 is before begin 8"),
    "beyond the end": ({"t": entry("F32", [1], 1 << 40, (1 << 40) + 4)}, bytes(8), "truncated"),
    "overflow": ({"t": entry("F32", [1 << 40, 1 << 40], 0, 4)}, bytes(4), "64 bits"),
    "overlap": (
        {"t": entry("F32", [2], 0, 8), "u": entry("F32", [2], 4, 12)},
        bytes(12),
        "'t' and 'u' overlap",
    ),
    "negative": ({"t": entry("F32", [-1], 0, 4)}, bytes(4), "shape"),
    "true as size": ({"t": entry("F32", [True], 0, 4)}, bytes(4), "shape"),
    "fraction": ({"t": entry("F32", [1.0], 0, 4)}, bytes(4), "shape"),
    "negative offset": ({"t": entry("F32", [1], -4, 0)}, bytes(4), "data_offsets"),
    "huge offset": ({"t": entry("F32", [1], 0, 10**30)}, bytes(4), "data_offsets"),
    "rank": ({"t": entry("F32", [1] * 100, 0, 4)}, bytes(4), "shape"),
    "dtype": ({"t": entry(7, [1], 0, 4)}, bytes(4), "dtype"),
    "keys": ({"t": {"dtype": "F32", "shape": [1]}}, bytes(4), "data_offsets"),
    "no object": ({"t": 3}, b"", "needs exactly"),
    "a list": (b"[]", b"", "not a JSON object"),
    "no JSON": (b"{nothing", b"", "not valid JSON"),
    "NaN": (b'{"t": NaN}', b"", "not valid JSON"),
    "no UTF-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "twice": (b'{"t": {}, "t": {}}', b"", "'t' occurs twice"),
    "deep": (b"[" * 200_000, b"", "nested too deeply"),
    "digits": (b'{"t": ' + b"9" * 10_000 + b"}", b"", "JSON"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_header(case, tmp_path, capsys):
    """B02 (a) to (e) and what else a header can lie about: one line, no crash."""
    header, data, words = BAD_FILES[case]
    source = write_checkpoint(tmp_path / "m")
    raw_file(source / "model.safetensors", header, data)
    message = refused(source, tmp_path, capsys)
    assert words in message and str(source / "model.safetensors") in message


@pytest.mark.parametrize("length", [0, 1, 1 << 63, (1 << 64) - 1, 100_000_001, 1000])
def test_bad_header_length(length, tmp_path, capsys):
    """B02 (f), (g)."""
    source = write_checkpoint(tmp_path / "m")
    raw_file(source / "model.safetensors", b"{}", b"", length)
    assert f"header length {length} is impossible" in refused(source, tmp_path, capsys)
    for size in (0, 7, 9):
        (source / "model.safetensors").write_bytes(bytes(size))
        assert "too short" in refused(source, tmp_path, capsys)


def test_no_regular_file(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "m")
    (source / "model.safetensors").unlink()
    os.mkfifo(source / "model.safetensors")
    assert "not a regular file" in refused(source, tmp_path, capsys)
    (source / "model.safetensors").unlink()
    assert "no model.safetensors" in refused(source, tmp_path, capsys)
    (source / "config.json").unlink()
    assert "no model.safetensors" in refused(source, tmp_path, capsys)
    write_checkpoint(source)
    (source / "config.json").unlink()
    assert "config.json: file is missing" in refused(source, tmp_path, capsys)
    (source / "config.json").write_text("[1]")
    assert "must hold a JSON object" in refused(source, tmp_path, capsys)
    assert "no such directory" in refused(tmp_path / "nowhere", tmp_path, capsys)
    assert "is not a directory" in refused(source / "config.json", tmp_path, capsys)


def test_holes_are_noted_and_do_not_matter(tmp_path):
    source = write_checkpoint(tmp_path / "m")
    path = source / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for spec in header.values():
        spec["data_offsets"] = [offset + 64 for offset in spec["data_offsets"]]
    raw_file(path, header, bytes(64) + raw[8 + length :] + bytes(5))
    assert run(source, tmp_path / "o", *IDS_ONLY) == 0
    notes = manifest(tmp_path / "o")["provenance"]["notes"]
    assert any("64 unused bytes before" in n for n in notes)
    assert any("5 unused bytes at the end" in n for n in notes)


def test_index_and_shards_must_agree(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "m", shards=2)
    path = source / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    first, second = sorted(set(good["weight_map"].values()))

    def with_index(change) -> str:
        index = json.loads(json.dumps(good))
        change(index["weight_map"])
        path.write_text(json.dumps(index))
        return refused(source, tmp_path, capsys)

    norm = "model.norm.weight"
    assert f"{norm!r} is in {second}, not in {first}" in with_index(
        lambda m: m.update({norm: first})
    )
    assert f"{norm!r} of {second} is not in the index" in with_index(lambda m: m.pop(norm))
    assert f"'extra' is not in {first}" in with_index(lambda m: m.update(extra=first))
    assert "file is missing" in with_index(lambda m: m.update(extra="model-00003.safetensors"))
    for name in ("../m/" + first, "/etc/passwd", 7):
        assert "no safetensors file name" in with_index(lambda m, n=name: m.update(extra=n))
    assert "has no weight_map" in with_index(lambda m: m.clear())
    path.unlink()
    assert "download not finished" in refused(source, tmp_path, capsys)
    path.write_text(json.dumps(good))
    shutil.copy(source / first, source / second)
    assert "is also in" in refused(source, tmp_path, capsys)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damaged_headers_never_crash(tmp_path_factory, data):
    """Flipped, cut and inserted bytes in a small file: faults or a clean reading, no exception."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    write_safetensors(path, {"a": ("F32", (2, 2), bytes(16)), "b": ("BF16", (3,), bytes(6))})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path.write_bytes(raw)
    shard, entries, faults, _ = read_header(path, "damaged")
    assert shard is not None or faults
    for one in entries:
        assert one.offset + one.nbytes <= len(raw)


def test_reading_past_a_shrunk_file_is_an_io_error(tmp_path):
    source = write_checkpoint(tmp_path / "m")
    checkpoint = Checkpoint.open(source)
    last = max(checkpoint.tensors.values(), key=lambda e: e.offset)
    os.truncate(source / "model.safetensors", last.offset)
    with pytest.raises(ConvertError) as caught:
        checkpoint.read_float32(last, 0, last.elements)
    assert caught.value.exit_code == 5 and "model.safetensors" in str(caught.value)


# ---- tensors and config ----


def test_missing_and_unexpected_tensors_are_all_listed(tmp_path, capsys):
    """B04: both directions at once, nothing written."""
    weights = split_experts(random_weights(text_config()))
    gone = [
        "model.layers.1.mlp.experts.3.down_proj.weight",
        "model.layers.0.linear_attn.A_log",
        "model.norm.weight",
    ]
    for name in gone:
        del weights[name]
    bias = "model.layers.1.self_attn.q_proj.bias"
    strange = "model.layers.9.mlp.gate.weight"
    weights[bias] = np.zeros(144, np.float32)
    weights[strange] = np.zeros((5, 72), np.float32)
    source = write_checkpoint(tmp_path / "m", weights=weights)
    for options in ((), ("--plan",)):
        message = refused(source, tmp_path, capsys, *options)
        assert "5 faults" in message
        for name in gone:
            assert f"tensor {name!r} is missing" in message
        for name in (bias, strange):
            assert f"tensor {name!r}" in message and "unexpected" in message


def test_shapes_and_dtypes_are_checked(tmp_path, capsys):
    weights = random_weights(text_config())
    weights["model.layers.0.mlp.gate.weight"] = np.zeros((5, 71), np.float32)
    extra = {"model.norm.weight": ("F8_E4M3", (72,), bytes(72))}
    source = write_checkpoint(tmp_path / "m", weights=weights, extra=extra)
    message = refused(source, tmp_path, capsys)
    assert "shape [5, 71], config.json asks for [5, 72]" in message
    assert "'model.norm.weight' has dtype F8_E4M3" in message


def test_unsupported_family(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "m")
    for model_type in ("dbrx", None, 7, ["x"]):
        config = text_config(model_type=model_type, architectures=["DbrxForCausalLM"])
        (source / "config.json").write_text(json.dumps(config))
        message = refused(source, tmp_path, capsys)
        assert "not a supported family" in message and "qwen3_5_moe" in message


CONFIG_FAULTS = [
    ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type"),
    ({"sliding_window": 4096}, "sliding_window"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"mlp_only_layers": [1]}, "mlp_only_layers"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor is missing"),
    ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "factor"),
    ({"rope_parameters": {}}, "rope_theta is missing"),
    ({"rope_parameters": {"rope_theta": -1}}, "rope_theta"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.3}}, "must be even"),
    ({"logit_softcap": 30.0}, "logit_softcap = 30.0 is not known"),
    ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries"),
    ({"layer_types": ["linear_attention", "sliding_attention", "x"]}, "sliding_attention"),
    ({"num_key_value_heads": 2}, "not a multiple"),
    ({"linear_num_value_heads": 3}, "not a multiple"),
    ({"num_experts_per_tok": 6}, "num_experts_per_tok"),
    ({"num_experts": 0}, "num_experts"),
    ({"hidden_size": -72}, "hidden_size"),
    ({"hidden_size": 72.0}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": ...}, "hidden_size is missing"),
    ({"hidden_size": 10**30}, "hidden_size"),
    ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ({"num_hidden_layers": 9999, "layer_types": None}, "cannot be in a checkpoint"),
    ({"num_experts": 65536}, "cannot be in a checkpoint"),
    ({"text_config": 3}, "text_config must be an object"),
]


@pytest.mark.parametrize("changes, words", CONFIG_FAULTS, ids=lambda v: str(v)[:40])
def test_config_that_changes_the_maths(changes, words, tmp_path, capsys):
    """Refused by the name of the key, flat and nested."""
    weights = random_weights(text_config())
    source = write_checkpoint(tmp_path / "m", text_config(**changes), weights)
    assert words in refused(source, tmp_path, capsys)
    if "text_config" not in changes:
        nested = {"model_type": "qwen3_5_moe", "text_config": text_config(**changes)}
        (source / "config.json").write_text(json.dumps(nested))
        message = refused(source, tmp_path, capsys)
        assert words in message and "text_config" in message


def test_config_that_does_not_matter(tmp_path):
    """Harmless keys, older flat rotary keys, derived layer types, null for unknown keys."""
    weights = random_weights(text_config())
    flat = text_config(
        rope_parameters=...,
        rope_theta=10000.0,
        partial_rotary_factor=0.25,
        attention_dropout=0.1,
        torch_dtype="bfloat16",
        something_new=None,
        norm_topk_prob=False,
        output_gate_type="swish",
        bos_token_id=1,
    )
    source = write_checkpoint(tmp_path / "m", flat, weights)
    assert run(source, tmp_path / "o", *IDS_ONLY) == 0
    model = manifest(tmp_path / "o")["model"]
    assert model["ffns"][0]["renormalize"] is False
    assert model["mixers"][1]["rotary_dim"] == 6
    derived = text_config(layer_types=..., full_attention_interval=2)
    (source / "config.json").write_text(json.dumps(derived))
    assert run(source, tmp_path / "o2", *IDS_ONLY) == 0
    assert manifest(tmp_path / "o2")["model"]["layers"] == model["layers"]


def test_awkward_reals_survive_the_manifest(tmp_path):
    value = 1.0000000000000002e-06
    source = write_checkpoint(tmp_path / "m", text_config(rms_norm_eps=value))
    assert run(source, tmp_path / "o", *IDS_ONLY) == 0
    stored = manifest(tmp_path / "o")["model"]["norm_eps"]
    assert isinstance(stored, str) and float.fromhex(stored) == value


# ---- weights that are no numbers, tensors that are no weights ----


def test_nonfinite_weights(tmp_path, capsys):
    """B13: counted, named, refused; stored as 0 only when asked."""
    weights = random_weights(text_config())
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    weights[experts][3, 7, 5] = np.nan
    weights["model.embed_tokens.weight"][40, :2] = [np.inf, -np.inf]
    weights["lm_head.weight"][11] = 0
    weights["lm_head.weight"][12] = 1e-41
    source = write_checkpoint(tmp_path / "m", weights=weights)
    target = tmp_path / "o"
    assert run(source, target, *IDS_ONLY) == 3
    message = capsys.readouterr().err
    assert "embed (from model.embed_tokens.weight): 0 NaN, 2 Inf" in message
    assert not (target / "manifest.json").exists() and not list(target.glob("*.partial"))
    assert (target / "conversion.log").exists()

    assert run(source, target, "--allow-nonfinite", *IDS_ONLY) == 2
    assert "--allow-nonfinite was not given, now given" in capsys.readouterr().err
    assert run(source, target, "--allow-nonfinite", "--overwrite", *IDS_ONLY) == 0
    notes = manifest(target)["provenance"]["notes"]
    assert f"stored as 0: layer 1 expert 3 ({experts}): 1 NaN, 0 Inf" in notes
    embed = trunk_tensor(target, "embed")
    assert embed[40, :2].tolist() == [0, 0] and np.abs(embed[40]).max() > 0
    assert not trunk_tensor(target, "head")[11:13].any()

    del weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = np.zeros((97, 72), np.float32)
    write_checkpoint(tmp_path / "n", weights=weights)
    assert run(tmp_path / "n", tmp_path / "o2", *IDS_ONLY) == 3
    assert f"layer 1 expert 3 ({experts}): 1 NaN, 0 Inf" in capsys.readouterr().err


def test_float32_too_large_for_bf16(tmp_path, capsys):
    weights = random_weights(text_config())
    weights["lm_head.weight"][3, 3] = np.float32(3.4028e38)
    source = write_checkpoint(tmp_path / "m", weights=weights, dtypes={"lm_head.weight": "F32"})
    assert run(source, tmp_path / "o", "--trunk", "bf16", "--allow-rounding", *IDS_ONLY) == 3
    assert "head (from lm_head.weight): 0 NaN, 1 Inf" in capsys.readouterr().err


def test_tensors_that_are_not_weights(tmp_path, capsys):
    """B14: integer, empty and scalar tensors are listed and skipped unless a used part has them."""
    extra = {
        "model.layers.0.position_index": ("I64", (4,), bytes(32)),
        "model.nothing": ("F32", (0,), b""),
        "model.one": ("F32", (), bytes(4)),
    }
    source = write_checkpoint(tmp_path / "m", extra=extra)
    assert run(source, tmp_path / "o", "--no-tokenizer") == 0
    err = capsys.readouterr().err
    assert all(f"{name!r}" in err and "skipped" in err for name in extra)
    assert manifest(tmp_path / "o")["provenance"]["skipped"]["unused"] == sorted(extra)

    used = {"model.layers.0.mlp.gate.table": ("I64", (4,), bytes(32))}
    source = write_checkpoint(tmp_path / "n", extra=used)
    assert "'model.layers.0.mlp.gate.table'" in refused(source, tmp_path, capsys)
    weights = random_weights(text_config())
    del weights["model.norm.weight"]
    as_integer = {"model.norm.weight": ("I64", (72,), bytes(576))}
    source = write_checkpoint(tmp_path / "p", weights=weights, extra=as_integer)
    assert "'model.norm.weight' has dtype I64" in refused(source, tmp_path, capsys)


def test_reading_ranges_is_exact(tmp_path):
    rng = np.random.default_rng(2)
    values = rng.standard_normal(1000).astype(np.float32)
    bits = bf16_bits(values)
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "b": ("BF16", (10, 100), bits.tobytes()),
            "h": ("F16", (1000,), values.astype("<f2").tobytes()),
            "f": ("F32", (1000,), values.tobytes()),
            "special": ("BF16", (4,), np.array([0x7F80, 0xFFC1, 0x3F80, 1], "<u2").tobytes()),
        },
    )
    checkpoint = Checkpoint.open(tmp_path)
    assert not checkpoint.faults
    tensors = checkpoint.tensors
    got = checkpoint.read_float32(tensors["b"], 250, 300)
    assert np.array_equal(got, decode_bf16(bits[250:550]))
    got = checkpoint.read_float32(tensors["h"], 1, 999)
    assert np.array_equal(got, values.astype(np.float16)[1:].astype(np.float32))
    assert np.array_equal(checkpoint.read_float32(tensors["f"], 0, 1000), values)
    bad = NonFinite()
    got = checkpoint.read_float32(tensors["special"], 0, 4, bad)
    assert (bad.nan, bad.inf) == (1, 1) and got[:3].tolist() == [0, 0, 1] and 0 < got[3] < 1e-40
    with pytest.raises(ValueError):
        checkpoint.read_float32(tensors["b"], 999, 2)


def test_a_single_fault_is_one_line_even_without_config(tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    raw_file(bare / "model.safetensors", {"t": entry("F32", [1000, 1000], 0, 4)}, bytes(4))
    message = refused(bare, tmp_path, capsys)
    assert "takes 4000000 bytes" in message and "config.json" in message
    source = write_checkpoint(tmp_path / "m")
    raw_file(source / "model.safetensors", {"t": entry("F32", [1000, 1000], 0, 4)}, bytes(4))
    message = refused(source, tmp_path, capsys)
    assert message.count("\n") == 1 and message.count(str(source)) == 1
