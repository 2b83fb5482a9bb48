"""Containers with 4-bit codecs: what they cost, that settings never change a bit, lossless repack."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from containers import edit_manifest
from conftest import CHECKPOINT, FIXTURES, convert
from convert_helpers import IDS_ONLY, manifest, run
from headrace_tools.convert.quantise import decode, matrix_bytes
from tiny_checkpoint import bf16_bits, write_safetensors

VALIDATION = Path(__file__).resolve().parents[2] / "models" / "val.txt"
WINDOWS = 4
IDS = 200

# Kullback-Leibler divergence from bf16 and the change of perplexity, measured with some room.
BOUNDS = {
    ("mxfp4", "int8"): (0.012, 0.02),
    ("int4", "int8"): (0.006, 0.01),
    ("nl4", "int8"): (0.006, 0.012),
    ("nl4", "nl4"): (0.012, 0.012),
}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def reference(model_bf16, headrace):
    """ids [WINDOWS, IDS] and the log probabilities of bf16, [WINDOWS, IDS, vocabulary]."""
    with headrace.Model(model_bf16, ctx=256) as model:
        ids = model.tokenize(VALIDATION.read_text(encoding="utf-8")[:12000])[: WINDOWS * IDS]
        windows = np.array(ids).reshape(WINDOWS, IDS)
        return windows, [log_softmax(model.logits(row.tolist())) for row in windows]


@pytest.fixture(scope="module", params=sorted(BOUNDS), ids="-".join)
def container(request, tmp_path_factory):
    experts, trunk = request.param
    path = convert(CHECKPOINT, tmp_path_factory.mktemp("four") / "model", "--experts", experts,
                   "--trunk", trunk)
    return request.param, path


def nll(log_p: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return -log_p[np.arange(len(ids) - 1), ids[1:]]


def test_codecs_of_the_container(container):
    (experts, trunk), path = container
    described = manifest(path)
    assert {bank["codec"] for bank in described["experts"]} == {experts}
    codecs = {t["name"]: t["codec"] for t in described["trunk"]["tensors"]}
    assert codecs["embed"] == "int8" and codecs.get("head", "int8") == "int8"
    assert (trunk in codecs.values()) and ("nl4" in codecs.values()) == (trunk == "nl4")


def test_close_to_bf16(container, reference, headrace):
    key, path = container
    windows, want = reference
    divergence, losses, before = [], [], []
    with headrace.Model(path, ctx=256) as model:
        for ids, log_p in zip(windows, want, strict=True):
            got = log_softmax(model.logits(ids.tolist()))
            divergence.append((np.exp(log_p) * (log_p - got)).sum(axis=-1).mean())
            losses.append(nll(got, ids))
            before.append(nll(log_p, ids))
    kl, change = float(np.mean(divergence)), float(np.mean(losses) - np.mean(before))
    print(f"{key}: KL {kl:.5f}, perplexity {np.exp(np.mean(losses)):.3f} "
          f"(bf16 {np.exp(np.mean(before)):.3f})")
    assert 0 < kl < BOUNDS[key][0] and abs(change) < BOUNDS[key][1]


def test_settings_never_change_a_bit(container, reference, headrace):
    _, path = container
    ids = reference[0][0].tolist()
    settings = [{"isa": isa} for isa in ("reference", "avx2", "avx512", "neon")]
    settings += [{"threads": n} for n in (1, 2, 3)] + [{"chunk": n} for n in (1, 7, 33, 512)]
    seen = {}
    for row in settings:
        try:
            with headrace.Model(path, ctx=256, **row) as model:
                logits = model.logits(ids[:60] if row.get("isa") == "reference" else ids)[:60]
        except (headrace.UsageError, headrace.UnsupportedError):
            assert row.get("isa") not in (None, "reference")  # this machine lacks the ISA
            continue
        assert np.isfinite(logits).all()
        digest = hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()
        seen.setdefault(digest, []).append(row)
    assert len(seen) == 1, seen


def test_embedding_in_four_bits_is_refused(container, tmp_path, headrace):
    (_, trunk), path = container
    if trunk != "nl4":
        return
    copy = tmp_path / "model"
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    entry = next(t for t in manifest(path)["trunk"]["tensors"] if t["name"] == "embed")
    rows, cols = entry["shape"]
    size = matrix_bytes("nl4", rows, cols)
    assert size <= entry["bytes"]

    def change(described):
        embed = next(t for t in described["trunk"]["tensors"] if t["name"] == "embed")
        embed["codec"], embed["bytes"] = "nl4", size

    edit_manifest(copy, change)
    with pytest.raises(headrace.HeadraceError, match='"embed" is nl4; allowed here: f32, bf16, int8'):
        headrace.Model(copy, ctx=64)


# -- lossless repack -------------------------------------------------------------------------


def expert_matrices(path: Path):
    """(layer, expert, matrix, weights) of every record."""
    for bank in manifest(path)["experts"]:
        data = np.fromfile(path / bank["file"], np.uint8).reshape(bank["experts"], -1)
        for expert, record in enumerate(data):
            offsets = record[32:56].view("<u8")
            for part, at in enumerate(offsets):
                rows, cols = bank["inner"], bank["hidden"]
                if part == 2:
                    rows, cols = cols, rows
                size = matrix_bytes(bank["codec"], rows, cols)
                blob = record[int(at) : int(at) + size]
                yield bank["layer"], expert, part, decode(bank["codec"], blob, rows, cols)


@pytest.mark.parametrize("name", ["gpt_oss", "kimi_k3", "kimi_k3_2", "kimi_k3_eps"])
def test_mxfp4_sources_are_kept_exactly(name, fixture_models):
    target = fixture_models(name, "auto")
    assert {bank["codec"] for bank in manifest(target)["experts"]} == {"mxfp4"}
    count = 0
    for got, want in zip(expert_matrices(target), expert_matrices(fixture_models(name)), strict=True):
        assert got[:3] == want[:3] and np.array_equal(got[3], want[3]), got[:3]
        count += bool(want[3].any())
    assert count > 0


@pytest.mark.parametrize("name", ["gpt_oss", "kimi_k3"])
def test_settings_never_change_a_bit_of_native_mxfp4(name, fixture_models, headrace):
    path = fixture_models(name, "auto")
    ids = np.load(FIXTURES / name / "oracle.npz")["input_ids"][-37:].tolist()
    settings = [{"isa": isa} for isa in ("reference", "avx2", "avx512", "neon", "neon-dotprod")]
    settings += [{"threads": 3}, {"chunk": 1}, {"chunk": 7}, {"chunk": 512}]
    settings.append({"ram": headrace.plan(path, ctx=64).floor})
    seen = {}
    for row in settings:
        try:
            with headrace.Model(path, ctx=64, **row) as model:
                seen.setdefault(model.logits(ids).tobytes(), []).append(row)
        except (headrace.UsageError, headrace.UnsupportedError):
            assert row.get("isa") not in (None, "reference")  # this machine lacks the ISA
    assert len(seen) == 1, list(seen.values())


def logits_and_bits(path: Path, headrace) -> tuple[np.ndarray, set[int]]:
    with headrace.Model(path, ctx=64) as model:
        logits = model.logits(list(range(20)))
    return logits, {bank.get("activations", 8) for bank in manifest(path)["experts"]}


def test_activations_follow_the_source_unless_asked_for(tmp_path, fixture_models, headrace):
    """8 bits where the weights were rounded anyway, or asked for; the weights do not change."""
    native = fixture_models("gpt_oss", "auto")
    made = {}
    for name, source, options in (
        ("fast", FIXTURES / "gpt_oss", ("--experts", "auto", "--activations", "8")),
        ("rounded", FIXTURES / "olmoe", ("--experts", "mxfp4")),
        ("fine", FIXTURES / "olmoe", ("--experts", "mxfp4", "--activations", "22")),
    ):
        made[name] = tmp_path / name
        assert run(source, made[name], *options, "--trunk", "bf16", *IDS_ONLY) == 0
    exact, bits = logits_and_bits(native, headrace)
    fast, fast_bits = logits_and_bits(made["fast"], headrace)
    assert (bits, fast_bits) == ({22}, {8})
    assert 1e-5 < np.abs(fast - exact).max() < 0.5 * np.abs(exact).max()
    for bank in manifest(native)["experts"]:
        assert (native / bank["file"]).read_bytes() == (made["fast"] / bank["file"]).read_bytes()
    rounded, rounded_bits = logits_and_bits(made["rounded"], headrace)
    fine, fine_bits = logits_and_bits(made["fine"], headrace)
    assert (rounded_bits, fine_bits) == ({8}, {22}) and not np.array_equal(rounded, fine)


def test_activations_without_mxfp4_are_refused(tmp_path, capsys):
    assert run(FIXTURES / "olmoe", tmp_path / "out", "--activations", "22", *IDS_ONLY) == 2
    assert "experts in mxfp4, and there are none" in capsys.readouterr().err


Raw = dict[str, tuple[str, tuple[int, ...], bytes]]


def read_safetensors(path: Path) -> Raw:
    """name -> (dtype, shape, bytes)"""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: (t["dtype"], tuple(t["shape"]), data[start + t["data_offsets"][0] : start + t["data_offsets"][1]])
        for name, t in header.items() if name != "__metadata__"
    }


def packed_checkpoint(source: Path, target: Path, scale_dtype: str = "BF16") -> dict[str, np.ndarray]:
    """A copy of a plain checkpoint with experts as symmetric INT4 in groups of 32; name -> weights."""
    target.mkdir()
    tensors = read_safetensors(source / "model.safetensors")
    weights = {}
    rng = np.random.default_rng(9)
    for name in [n for n in tensors if ".experts." in n and n.endswith("_proj.weight")]:
        _, (rows, cols), _ = tensors.pop(name)
        codes = rng.integers(0, 16, (rows, cols)).astype(np.uint32)
        bits = bf16_bits((rng.random((rows, -(-cols // 32))) * 0.02 + 0.001).astype(np.float32))
        scales = (bits.astype(np.uint32) << 16).view(np.float32)
        raw = bits.astype("<u2").tobytes() if scale_dtype == "BF16" else scales.tobytes()
        wide = np.zeros((rows, -(-cols // 8) * 8), np.uint32)
        wide[:, :cols] = codes
        words = (wide.reshape(rows, -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=2)
        tensors[name + "_packed"] = ("I32", words.shape, words.astype("<u4").tobytes())
        tensors[name + "_scale"] = (scale_dtype, scales.shape, raw)
        tensors[name + "_shape"] = ("I64", (2,), np.array([rows, cols], "<i8").tobytes())
        weights[name] = (codes.astype(np.float32) - 8) * np.repeat(scales, 32, axis=1)[:, :cols]
    write_safetensors(target / "model.safetensors", tensors)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
            "group_size": 32, "dynamic": False}}}}
    (target / "config.json").write_text(json.dumps(config))
    return weights


def test_int4_sources_are_kept_exactly(tmp_path):
    weights = packed_checkpoint(FIXTURES / "kimi_k2", tmp_path / "source")
    target = tmp_path / "native"
    assert run(tmp_path / "source", target, "--experts", "auto", *IDS_ONLY) == 0
    assert {bank["codec"] for bank in manifest(target)["experts"]} == {"int4"}
    parts = ("gate_proj", "up_proj", "down_proj")
    found = 0
    for layer, expert, part, got in expert_matrices(target):
        name = f"model.layers.{layer}.mlp.experts.{expert}.{parts[part]}.weight"
        assert np.array_equal(got, weights[name]), name
        found += 1
    assert found == len(weights)


def test_scales_that_bf16_cannot_hold_are_not_called_native(tmp_path):
    packed_checkpoint(FIXTURES / "kimi_k2", tmp_path / "source", "F32")
    assert run(tmp_path / "source", tmp_path / "out", "--experts", "auto", *IDS_ONLY) == 0
    assert {bank["codec"] for bank in manifest(tmp_path / "out")["experts"]} == {"int8"}


def test_mxfp4_scales_that_are_no_numbers_are_refused_by_name(tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    tensors = read_safetensors(FIXTURES / "gpt_oss" / "model.safetensors")
    name = next(n for n in sorted(tensors) if n.endswith("gate_up_proj_scales"))

    def edit(tensor, value):
        dtype, shape, raw = tensors[tensor]
        array = np.frombuffer(raw, np.uint8).reshape(shape).copy()
        array[1, 3, :2] = value
        tensors[tensor] = (dtype, shape, array.tobytes())

    edit(name.replace("_scales", "_blocks"), 0x77)
    edit(name, (255, 255))
    write_safetensors(source / "model.safetensors", tensors)
    (source / "config.json").write_bytes((FIXTURES / "gpt_oss" / "config.json").read_bytes())
    assert run(source, tmp_path / "out", "--experts", "auto", *IDS_ONLY) != 0
    said = capsys.readouterr().err
    assert "scale byte is 255" in said and "expert 1" in said and "gate_up_proj" in said
    assert "2 such scales" in said
