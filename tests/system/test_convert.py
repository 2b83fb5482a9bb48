"""headrace-convert on sound checkpoints: every byte of the result, layouts, names, plans."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import containers
import numpy as np
import pytest
import sparse_checkpoint
from convert_helpers import IDS_ONLY, data_files, manifest, measured, run, tree, trunk_tensor
from headrace_tools.convert import cli
from headrace_tools.convert.families.rope import rope_frequencies
from headrace_tools.convert.quantise import decode, encode_block, matrix_bytes
from headrace_tools.crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.reference_model import ReferenceModel, load_tensors
from tiny_checkpoint import random_weights, split_experts, text_config, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
NAMES = sorted(p.parent.name for p in FIXTURES.glob("qwen3_5_moe*/oracle.json"))
TINY = ROOT / "models" / "tiny-qwen3.5-moe"


@pytest.fixture(autouse=True)
def without_engine(monkeypatch):
    """The converter alone; one test below brings the engine in."""
    monkeypatch.setattr(cli, "_engine_verify", lambda: None)


# ---- checksum and codecs ----


@given(st.integers(0, 9000), st.integers(0, 2**32 - 1))
def test_crc32c_equals_the_other_implementation(size, seed):
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    cut = size // 3
    assert crc32c(data) == containers.crc32c(data.tobytes())
    assert crc32c(data[cut:], crc32c(data[:cut].tobytes())) == crc32c(data)


def test_crc32c_over_several_pieces():
    data = np.random.default_rng(5).integers(0, 256, (5 << 20) + 13, dtype=np.uint8)
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(data) == containers.crc32c(data.tobytes())


def encode_whole(codec: str, w: np.ndarray, step: int) -> bytes:
    blob = np.zeros(matrix_bytes(codec, *w.shape), np.uint8)
    for first in range(0, w.shape[0], step):
        for offset, data in encode_block(codec, w[first : first + step], first, w.shape[0]):
            blob[offset : offset + data.size] = data
    return blob.tobytes()


@given(
    st.sampled_from(["int8", "bf16", "f32"]),
    st.integers(1, 200),
    st.integers(1, 150),
    st.sampled_from([64, 128, 256]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_encoder_equals_the_other_implementation(codec, rows, cols, step, seed):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, cols), dtype=np.float32) * np.exp2(
        rng.integers(-140, 100, (rows, 1))
    ).astype(np.float32)
    w[rng.random((rows, cols)) < 0.1] = 0
    blob = encode_whole(codec, w, step)
    assert blob == containers.encode(codec, w)
    back = decode(codec, blob, rows, cols)
    if codec == "f32":
        assert np.array_equal(back, w)
    elif codec == "bf16":
        assert (np.abs(back - w) <= np.abs(w) * 2.0**-8 + 2.0**-134).all()
    else:
        scale = np.abs(w).max(axis=1, keepdims=True) / 127
        assert (np.abs(back - w) <= scale * 0.5001 + 2.0**-126 * 127).all()


def test_int8_rows_at_the_edges():
    w = np.zeros((4, 3), np.float32)
    w[1] = [1e-40, -2e-39, 0]  # the quotient is below the smallest normal number
    w[2] = [127, -127, 63.5]  # 63.5 is a tie: to the even 64
    w[3] = [3.4e38, -1, 2.6771654e36 / 2]
    blob = encode_whole("int8", w, 64)
    scale = np.frombuffer(blob, "<f4", 64)
    panel = np.frombuffer(blob, np.uint8, offset=256).reshape(16, 64, 4)[0]
    assert scale[:2].tolist() == [0, 0] and (scale[4:] == 0).all()
    assert panel[:2].tolist() == [[128] * 4] * 2
    assert panel[2].tolist() == [255, 1, 192, 128] and scale[2] == 1
    assert np.isfinite(scale).all() and panel[3, 0] == 255 and (panel[4:] == 128).all()


def test_rotary_frequencies_are_exact_where_that_is_known():
    assert rope_frequencies(16.0, 8) == (1.0, 0.5, 0.25, 0.125)
    assert rope_frequencies(1e4, 4) == (1.0, 0.01)
    ours = np.array(rope_frequencies(1e7, 64))
    assert np.allclose(ours, 1e7 ** -(np.arange(32) / 32), rtol=4e-16, atol=0)


# ---- every byte of a container ----


def canonical(directory: Path) -> dict[str, np.ndarray]:
    """The resident tensors a container must hold, float32, from formats/container.md."""
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config", config)
    w = load_tensors(directory)
    out = {"embed": w["embed_tokens.weight"], "final_norm": 1 + w["norm.weight"]}
    if "lm_head.weight" in w:
        out["head"] = w["lm_head.weight"]
    for i, kind in enumerate(ReferenceModel.layer_kinds(type("C", (), {"config": config})())):
        p, n = f"layers.{i}.", f"layers.{i}."
        out[n + "mixer_norm"] = 1 + w[p + "input_layernorm.weight"]
        out[n + "ffn_norm"] = 1 + w[p + "post_attention_layernorm.weight"]
        out[n + "moe.router"] = w[p + "mlp.gate.weight"]
        out[n + "moe.shared_gate"] = w[p + "mlp.shared_expert_gate.weight"]
        for part in ("gate", "up", "down"):
            out[f"{n}moe.shared.{part}"] = w[f"{p}mlp.shared_expert.{part}_proj.weight"]
        if kind == "full_attention":
            heads, dim = config["num_attention_heads"], config["head_dim"]
            both = w[p + "self_attn.q_proj.weight"].reshape(heads, 2, dim, -1)
            out[n + "attn.q"] = both[:, 0].reshape(heads * dim, -1)
            out[n + "attn.gate"] = both[:, 1].reshape(heads * dim, -1)
            for part in ("k", "v", "o"):
                out[f"{n}attn.{part}"] = w[f"{p}self_attn.{part}_proj.weight"]
            for part in ("q_norm", "k_norm"):
                out[f"{n}attn.{part}"] = 1 + w[f"{p}self_attn.{part}.weight"]
        else:
            q = p + "linear_attn."
            for part in ("qkv", "z", "a", "b"):
                out[f"{n}delta.{part}"] = w[f"{q}in_proj_{part}.weight"]
            out[n + "delta.out"] = w[q + "out_proj.weight"]
            out[n + "delta.conv"] = w[q + "conv1d.weight"][:, 0, :].T
            out[n + "delta.a_log"], out[n + "delta.dt_bias"] = w[q + "A_log"], w[q + "dt_bias"]
            out[n + "delta.norm"] = w[q + "norm.weight"]
    return out


SMALL = ("router", "shared_gate", "delta.a", "delta.b")


def check_container(source: Path, path: Path, experts: str, trunk: str) -> None:
    made = manifest(path)
    listed = tree(path)
    lines = (path / "manifest.sha256").read_text()
    names = sorted(set(listed) - {"manifest.sha256"})
    assert lines == "".join(f"{listed[name]}  {name}\n" for name in names)
    text = json.dumps(made, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    assert (path / "manifest.json").read_text() == text

    raw = (path / "trunk.bin").read_bytes()
    assert len(raw) == made["trunk"]["bytes"] and len(raw) % 4096 == 0
    chunks = [raw[i : i + (1 << 20)] for i in range(0, len(raw), 1 << 20)]
    assert made["trunk"]["crc32c"] == [containers.crc32c(chunk) for chunk in chunks]
    want = canonical(source)
    rebuilt, offset = bytearray(len(raw)), 0
    for entry in made["trunk"]["tensors"]:
        assert entry["offset"] % 4096 == 0 and entry["offset"] >= offset
        offset = entry["offset"] + entry["bytes"]
        if entry["name"].startswith("rope."):
            assert entry["codec"] == "f64"
            blob = raw[entry["offset"] : offset]
        else:
            value = want.pop(entry["name"])
            assert entry["shape"] == list(value.shape)
            codec = "f32" if len(entry["shape"]) == 1 or entry["name"].endswith("conv") else trunk
            if entry["name"].endswith(SMALL):
                codec = "bf16"
            assert entry["codec"] == codec, entry["name"]
            blob = containers.encode(codec, np.atleast_2d(value))
        assert len(blob) == entry["bytes"], entry["name"]
        rebuilt[entry["offset"] : offset] = blob
    assert not want, f"not in the container: {sorted(want)}"
    assert bytes(rebuilt) == raw

    reference = ReferenceModel(source, np.float32)
    for bank in made["experts"]:
        raw = (path / bank["file"]).read_bytes()
        records = [
            containers.record(experts, bank["layer"], e, *reference.expert(bank["layer"], e))
            for e in range(bank["experts"])
        ]
        assert {len(r) for r in records} == {bank["record_bytes"]}
        assert raw == b"".join(records)
        assert bank["crc32c"] == [int.from_bytes(r[60:64], "little") for r in records]


@pytest.mark.parametrize("codecs", [("int8", "int8"), ("bf16", "bf16"), ("int8", "bf16")])
@pytest.mark.parametrize("name", NAMES)
def test_every_byte(name, codecs, tmp_path):
    experts, trunk = codecs
    out = tmp_path / "out"
    assert run(FIXTURES / name, out, "--experts", experts, "--trunk", trunk, *IDS_ONLY) == 0
    check_container(FIXTURES / name, out, experts, trunk)


def test_the_model_description(tmp_path):
    assert run(FIXTURES / "qwen3_5_moe_long", tmp_path / "out", *IDS_ONLY) == 0
    made = manifest(tmp_path / "out")
    assert made["format"] == "headrace-container" and made["version"] == 1
    assert made["tokenizer"] is None and made["stop_ids"] == [7]
    model = made["model"]
    assert model["layers"] == [{"mixer": m, "ffn": 0} for m in (0, 0, 0, 1)]
    assert model["mixers"][1] == {
        "kind": "attention",
        "heads": 3,
        "kv_heads": 1,
        "head_dim": 16,
        "rotary_dim": 8,
        "rope": "rope.0",
        "qk_norm": True,
        "output_gate": True,
    }
    delta = model["mixers"][0]
    assert (delta["key_heads"], delta["value_heads"], delta["value_dim"]) == (2, 6, 24)
    assert delta["qk_norm_eps"] == delta["norm_eps"] == model["norm_eps"] == 1e-6
    assert model["ffns"][0]["renormalize"] is True and model["ffns"][0]["top_k"] == 3
    assert trunk_tensor(tmp_path / "out", "rope.0").tolist() == list(rope_frequencies(1e7, 8))
    assert "/" not in made["provenance"]["source"]


def test_fused_and_apart_and_wrapped_give_the_same_data(tmp_path):
    seen = []
    for name in ("qwen3_5_moe", "qwen3_5_moe_per_expert", "qwen3_5_moe_vl"):
        assert run(FIXTURES / name, tmp_path / name, *IDS_ONLY) == 0
        seen.append(data_files(tmp_path / name))
    assert seen[0] == seen[1] == seen[2]
    skipped = manifest(tmp_path / "qwen3_5_moe_vl")["provenance"]["skipped"]
    assert skipped["vision"]["tensors"] > 0 and skipped["mtp"]["tensors"] == 19


def test_twice_is_the_same_and_again_is_nothing(tmp_path, capsys):
    source = FIXTURES / "qwen3_5_moe_vl"
    shutil.copytree(source, tmp_path / "elsewhere" / source.name)
    assert run(source, tmp_path / "a", "--no-tokenizer") == 0
    assert run(tmp_path / "elsewhere" / source.name, tmp_path / "b", *IDS_ONLY) == 0
    before = tree(tmp_path / "a")
    assert before == tree(tmp_path / "b")
    assert str(tmp_path) not in (tmp_path / "b" / "manifest.json").read_text()
    capsys.readouterr()
    assert run(source, tmp_path / "a", "--no-tokenizer") == 0
    assert "nothing to do" in capsys.readouterr().err
    assert run(source, tmp_path / "a", "--trunk", "bf16", *IDS_ONLY) == 2
    assert "--trunk was int8, now bf16" in capsys.readouterr().err
    assert tree(tmp_path / "a") == before
    assert run(source, tmp_path / "a", "--trunk", "bf16", "--overwrite", *IDS_ONLY) == 0
    assert run(source, tmp_path / "a", "--overwrite", *IDS_ONLY) == 0
    assert tree(tmp_path / "a") == before


def test_shards_do_not_matter(tmp_path):
    weights = split_experts(random_weights(text_config()))
    for shards in (1, 3):
        write_checkpoint(tmp_path / f"s{shards}" / "m", weights=weights, shards=shards)
        assert run(tmp_path / f"s{shards}" / "m", tmp_path / f"o{shards}", *IDS_ONLY) == 0
    assert data_files(tmp_path / "o1") == data_files(tmp_path / "o3")


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_wider_sources_are_rounded_only_when_asked(dtype, tmp_path):
    rng = np.random.default_rng(3)
    config = text_config()
    weights = {
        name: (rng.standard_normal(w.shape) * 0.1).astype(np.float16).astype(np.float32)
        for name, w in random_weights(config).items()
    }
    write_checkpoint(tmp_path / "m", config, weights, dtype=dtype)
    bf16 = ("--trunk", "bf16", "--experts", "bf16", "--no-tokenizer")
    assert run(tmp_path / "m", tmp_path / "exact", *bf16) == 0
    assert run(tmp_path / "m", tmp_path / "o", *bf16, "--allow-rounding") == 0
    for made in ("exact", "o"):
        router = trunk_tensor(tmp_path / made, "layers.1.moe.router")
        assert np.array_equal(router, weights["model.layers.1.mlp.gate.weight"])
    want = weights["model.embed_tokens.weight"]
    assert np.array_equal(trunk_tensor(tmp_path / "exact", "embed"), want)
    embed = trunk_tensor(tmp_path / "o", "embed")
    assert not np.array_equal(embed, want) and np.abs(embed - want).max() < 0.01
    for made, codec, word in (("exact", "f32", "stored as f32"), ("o", "bf16", "rounded")):
        described = manifest(tmp_path / made)
        assert any(word in note for note in described["provenance"]["notes"])
        assert {bank["codec"] for bank in described["experts"]} == {codec}


def test_tied_embeddings(tmp_path, capsys):
    config = text_config(tie_word_embeddings=True)
    weights = random_weights(config)
    assert "lm_head.weight" not in weights
    write_checkpoint(tmp_path / "m", config, weights)
    assert run(tmp_path / "m", tmp_path / "o", *IDS_ONLY) == 0
    assert manifest(tmp_path / "o")["model"]["head"] == "embed"
    assert "head" not in {t["name"] for t in manifest(tmp_path / "o")["trunk"]["tensors"]}

    same = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    write_checkpoint(tmp_path / "same", config, same)
    assert run(tmp_path / "same", tmp_path / "o2", *IDS_ONLY) == 0
    assert data_files(tmp_path / "o2") == data_files(tmp_path / "o")

    other = {**weights, "lm_head.weight": -weights["model.embed_tokens.weight"]}
    write_checkpoint(tmp_path / "other", config, other)
    assert run(tmp_path / "other", tmp_path / "o3", *IDS_ONLY) == 3
    assert "lm_head.weight" in capsys.readouterr().err

    write_checkpoint(tmp_path / "untied", text_config(), weights)
    assert run(tmp_path / "untied", tmp_path / "o4", *IDS_ONLY) == 3
    assert "'lm_head.weight' is missing" in capsys.readouterr().err


def test_awkward_sizes_are_padded(tmp_path, capsys):
    """B11: hidden 72, inner 40, head_dim 24, vocab 97 (the generator's defaults)."""
    config = text_config()
    write_checkpoint(tmp_path / "m", config)
    assert run(tmp_path / "m", tmp_path / "o", "--plan", "--no-tokenizer") == 0
    assert "% of it padding" in capsys.readouterr().out
    assert run(tmp_path / "m", tmp_path / "o", *IDS_ONLY) == 0
    check_container(tmp_path / "m", tmp_path / "o", "int8", "int8")


# ---- what lies beside the weights ----


def test_missing_side_files(tmp_path, capsys):
    """B09."""
    write_checkpoint(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").unlink()
    assert run(tmp_path / "m", tmp_path / "o") == 3
    assert "tokenizer.json: is missing" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert run(tmp_path / "m", tmp_path / "o", "--no-tokenizer") == 0
    err = capsys.readouterr().err
    made = manifest(tmp_path / "o")
    for what in ("generation_config.json is missing", "chat template is missing"):
        assert what in err
        assert any(what in note for note in made["provenance"]["notes"])
    assert made["stop_ids"] == [7]


def test_stop_ids(tmp_path, capsys):
    config = text_config(eos_token_id=[3, 6])
    write_checkpoint(tmp_path / "m", config, generation={"eos_token_id": [6, 9]})
    assert run(tmp_path / "m", tmp_path / "o", *IDS_ONLY) == 0
    assert manifest(tmp_path / "o")["stop_ids"] == [6, 9, 3]
    write_checkpoint(tmp_path / "n", config, generation={"eos_token_id": 97})
    assert run(tmp_path / "n", tmp_path / "o2", *IDS_ONLY) == 3
    assert "eos_token_id 97" in capsys.readouterr().err


def test_hub_cache_layout(tmp_path, capsys):
    """B10: snapshots whose files are links to blobs; dangling and incomplete ones."""
    plain = write_checkpoint(tmp_path / "plain" / "tiny", shards=2)
    cache = tmp_path / "models--someone--tiny"
    snapshot, blobs = cache / "snapshots" / "0123abcd", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(plain.iterdir())):
        shutil.copy(file, blobs / f"blob{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{number}")
    assert run(plain, tmp_path / "a", *IDS_ONLY) == 0
    assert run(snapshot, tmp_path / "b", *IDS_ONLY) == 0
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert manifest(tmp_path / "b")["model"]["name"] == "tiny"

    link = snapshot / "model-00002-of-00002.safetensors"
    blob = blobs / os.path.basename(os.readlink(link))
    incomplete = blob.with_name(blob.name + ".incomplete")
    blob.rename(incomplete)
    assert run(snapshot, tmp_path / "c", *IDS_ONLY) == 3
    err = capsys.readouterr().err
    assert "download not finished" in err and link.name in err
    link.unlink()
    link.symlink_to(f"../../blobs/{incomplete.name}")
    assert run(snapshot, tmp_path / "c", *IDS_ONLY) == 3
    assert "download not finished" in capsys.readouterr().err
    link.unlink()
    assert run(snapshot, tmp_path / "c", *IDS_ONLY) == 3
    assert "download not finished" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_paths(tmp_path, monkeypatch, capsys):
    """B52: spaces, other scripts, 300 characters, relative, trailing slash, a quoted ~."""
    base = tmp_path / "mo del" / "モデル" / "ž" / ("x" * 150) / ("y" * 150)
    write_checkpoint(base / "src")
    want = None
    for number, (source, target) in enumerate(
        [
            (base / "src", base / "out 0"),
            (f"{base}/src/", f"{base}/out 1/"),
            ("src", "out 2"),
            ("./src/../src", "./out 3"),
            ("~/src", "~/out 4"),
        ]
    ):
        monkeypatch.chdir(base)
        monkeypatch.setenv("HOME", str(base))
        assert run(source, target, *IDS_ONLY) == 0
        made = tree(base / f"out {number}")
        want = want or made
        assert made == want
    assert run("モデル 2", "out 9", *IDS_ONLY) == 3
    assert "モデル 2: no such directory" in capsys.readouterr().err


def test_places_that_are_refused(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "m")
    before = tree(source)
    for target in (source, source / "out", tmp_path / "link" / "out"):
        if not (tmp_path / "link").exists():
            (tmp_path / "link").symlink_to(source)
        assert run(source, target, *IDS_ONLY) == 2
        assert "source directory" in capsys.readouterr().err
    assert tree(source) == before
    (tmp_path / "file").write_text("")
    assert run(source, tmp_path / "file", *IDS_ONLY) == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "trunk.bin").write_text("precious")
    for extra in ((), ("--overwrite",)):
        assert run(source, tmp_path / "full", *extra, *IDS_ONLY) == 2
        assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "full" / "trunk.bin").read_text() == "precious"
    assert run(source) == 2 and run() == 2 and run(source, "x", "--experts", "int3") == 2


# ---- plans ----


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return sparse_checkpoint.write_sparse_checkpoint(tmp_path_factory.mktemp("sparse") / "big")


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_plan_of_67_gigabytes(sparse, codec, tmp_path):
    """Exact sizes of the real model from headers alone, in seconds and little memory."""
    argv = [sparse, tmp_path / "o", "--plan", "--json", "--no-tokenizer", "--experts", codec]
    done, seconds, peak = measured(argv)
    assert done.returncode == 0, done.stderr
    assert seconds < 20 and peak < 1 << 30
    plan = json.loads(done.stdout)
    assert plan["source_bytes"] == {
        "text": sparse_checkpoint.TEXT_BYTES,
        "experts": sparse_checkpoint.EXPERT_BYTES,
        "mtp": sparse_checkpoint.MTP_BYTES,
        "vision": sparse_checkpoint.VISION_BYTES,
    }
    assert plan["skipped"]["mtp"]["tensors"] == sparse_checkpoint.MTP_TENSORS
    assert plan["skipped"]["vision"]["tensors"] == sparse_checkpoint.VISION_TENSORS
    assert plan["parameters"] == (4_896_711_936 + 64_424_509_440) // 2
    assert plan["source_tensors"] == 1045 and plan["stop_ids"] == [248046, 248044]
    record = 64 + 3 * (512 * 2048 * 2) if codec == "bf16" else 64 + 3 * 512 * 2048 + 4 * 3072
    assert plan["record_bytes"] == -(-record // 4096) * 4096
    banks = [size for name, size in plan["files"].items() if name.startswith("experts-")]
    assert banks == [256 * plan["record_bytes"]] * 40
    assert plan["peak_ram_bytes"] < 1 << 30
    assert plan["output_bytes"] >= sum(plan["files"].values())
    assert not (tmp_path / "o").exists()


@pytest.mark.plain_build
def test_memory_stays_bounded(tmp_path):
    """A wide vocabulary and many experts: far more data than the peak of the process."""
    sparse_checkpoint.write_sparse_checkpoint(
        tmp_path / "m",
        vocab_size=300_000,
        hidden_size=512,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_experts=64,
    )
    done, _, peak = measured([tmp_path / "m", tmp_path / "o", *IDS_ONLY])
    assert done.returncode == 0, done.stderr
    assert sum(f.stat().st_size for f in (tmp_path / "m").iterdir()) > 700_000_000
    assert peak < 300 << 20


@pytest.mark.skipif(not TINY.is_dir(), reason="the bundled checkpoint is not here")
def test_the_bundled_checkpoint(tmp_path):
    assert run(TINY, tmp_path / "o", "--quiet", "--hash-source") == 0
    made = manifest(tmp_path / "o")
    assert made["parameters"] == 14_597_616 and made["stop_ids"] == [4095, 4093]
    assert made["tokenizer"]["bytes"] == (tmp_path / "o" / "tokenizer.bin").stat().st_size
    assert len(made["provenance"]["shards"][0]["sha256"]) == 64
    check_container(TINY, tmp_path / "o", "int8", "int8")


def test_the_engine_checks_the_result(tmp_path, headrace, monkeypatch, capsys):
    """With the engine at hand it has the last word, and a bad result does not look whole."""
    monkeypatch.undo()
    source = FIXTURES / "qwen3_5_moe_eps"
    assert cli._engine_verify() is not None
    assert run(source, tmp_path / "o", *IDS_ONLY) == 0
    assert headrace.verify(tmp_path / "o") == []
    monkeypatch.setattr(headrace, "verify", lambda path: ["layer 1 expert 2: wrong"])
    assert run(source, tmp_path / "bad", *IDS_ONLY) == 5
    assert "layer 1 expert 2: wrong" in capsys.readouterr().err
    assert not (tmp_path / "bad" / "manifest.sha256").exists()
