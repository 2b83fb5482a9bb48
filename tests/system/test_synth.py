"""headrace-synth: small geometries of several families, checked by the engine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from convert_helpers import data_files, manifest
from headrace_tools.crc32c import crc32c, crc32c_join, crc32c_numpy
from headrace_tools.synth import cli, direct, presets, writer
from headrace_tools.synth.geometry import layout
from headrace_tools.convert.options import Options
from headrace_tools.convert.quantise import decode
from headrace_tools.simulate.trace import read_trace
from headrace_tools.synth.routing import TOPICS, topic_chain

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def synth(out: Path, *options: object) -> Path:
    assert cli.main([str(out), "--quiet", *map(str, options)]) == 0
    return out


def geometry(name: str, path: Path, **changes: object) -> Path:
    """A fixture's config with larger numbers, as a file."""
    config = json.loads((FIXTURES / name / "config.json").read_text())
    path.write_text(json.dumps({**config, **changes}))
    return path


def ids_of(container: Path) -> list[int]:
    return [int(word) for word in (container / "tokens.txt").read_text().split()]


@pytest.mark.parametrize(
    ("fixture", "codecs", "changes"),
    [
        ("qwen3_moe", ("nl4", "int8"), {"hidden_size": 200, "vocab_size": 300}),
        ("deepseek_v3_moonlight", ("rvq4x64", "nl4"), {}),
        ("kimi_k3", ("mxfp4", "int8"), {}),
        ("qwen3_5_moe", ("int8", "bf16"), {}),
    ],
)
def test_every_family_makes_a_valid_container(
    headrace, headrace_bin, tmp_path, fixture, codecs, changes
):
    config = geometry(fixture, tmp_path / "small.json", **changes)
    whole = json.loads(config.read_text())
    for part in (whole, whole.get("text_config", {})):
        part.pop("quantization_config", None)  # weights are not quantised twice
    config.write_text(json.dumps(whole))
    out = synth(tmp_path / "c", "--geometry", config, "--experts", codecs[0], "--trunk", codecs[1])
    done = subprocess.run([headrace_bin, "verify", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(bank["codec"] == codecs[0] for bank in manifest(out)["experts"])
    with headrace.Model(out, ram="1GiB", ctx=64) as model:
        assert not model.info.has_tokenizer
        logits = model.logits(ids_of(out)[:40])
    assert np.isfinite(logits).all() and 0.3 < logits.std() < 10


def test_activations_are_declared_as_a_conversion_does(headrace, headrace_bin, tmp_path):
    """The same bytes but for the declaration; the engine takes it, and says so wherever it names a codec."""
    config = geometry("qwen3_moe", tmp_path / "small.json")
    made = {bits: synth(tmp_path / f"c{bits}", "--geometry", config, "--experts", "mxfp4",
                        "--activations", bits) for bits in (8, 22)}
    banks = {bits: {bank.get("activations") for bank in manifest(path)["experts"]}
             for bits, path in made.items()}
    assert banks == {8: {None}, 22: {22}}
    name = "experts-0000.bin"
    assert (made[8] / name).read_bytes() == (made[22] / name).read_bytes()
    logits = {}
    for bits, path in made.items():
        assert headrace.verify(path) == []
        assert headrace.plan(path).expert_activations == bits
        with headrace.Model(path, ram="1GiB", ctx=64) as model:
            assert model.info.expert_activations == bits
            logits[bits] = model.logits(ids_of(path)[:8])
        said = subprocess.run([headrace_bin, "info", path], capture_output=True, text=True, check=True)
        assert ("mxfp4, 22-bit activations" in said.stdout) == (bits == 22)
    assert not np.array_equal(logits[8], logits[22])


def test_activations_are_for_mxfp4(tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main([str(tmp_path / "c"), "--preset", "k3-slice", "--activations", "22"])
    assert refused.value.code == 2 and "mxfp4" in capsys.readouterr().err


def test_bytes_follow_from_the_seed(tmp_path, headrace):
    config = geometry("qwen3_moe", tmp_path / "small.json")
    first = synth(tmp_path / "a", "--geometry", config, "--seed", 5)
    again = synth(tmp_path / "b", "--geometry", config, "--seed", 5)
    other = synth(tmp_path / "c", "--geometry", config, "--seed", 6)
    assert data_files(first) == data_files(again)
    assert not set(data_files(first).values()) & set(data_files(other).values())
    assert ids_of(first) == ids_of(again) != ids_of(other)


def test_bytes_depend_neither_on_threads_nor_on_resuming(tmp_path, headrace, monkeypatch):
    config = geometry("qwen3_moe", tmp_path / "small.json", vocab_size=1000, hidden_size=256)
    made = []
    for threads, group in ((1, 1 << 20), (5, 16 << 20)):
        monkeypatch.setattr(writer.os, "cpu_count", lambda n=threads: n)
        monkeypatch.setattr(direct, "GROUP", group)
        made.append(synth(tmp_path / str(threads), "--geometry", config))
    assert data_files(made[0]) == data_files(made[1])

    bank = writer.Synthesis.write_bank

    def interrupted(self, file, one, progress):
        if one.spec.layer:
            raise KeyboardInterrupt
        bank(self, file, one, progress)

    monkeypatch.setattr(writer.Synthesis, "write_bank", interrupted)
    assert cli.main([str(tmp_path / "r"), "--geometry", str(config), "--quiet"]) == 130
    assert (tmp_path / "r" / "conversion.log").read_text().count('"name": "') > 1
    monkeypatch.setattr(writer.Synthesis, "write_bank", bank)
    monkeypatch.setattr(writer.Synthesis, "write_trunk", None)
    assert data_files(synth(tmp_path / "r", "--geometry", config)) == data_files(made[0])


@pytest.mark.parametrize("fault", ["", "short", "no direct I/O"])
def test_a_stream_is_written_as_it_was_put(tmp_path, monkeypatch, fault):
    """Its memory is used again for what comes later, whoever still hashes and writes."""
    rng, real, calls = np.random.default_rng(0), os.pwritev, []
    expected = np.zeros(50 * 8192, np.uint8)

    def pwritev(fd, views, offset):
        calls.append(sum(len(view) for view in views))
        time.sleep(1e-3)
        if fault == "no direct I/O" and len(calls) == 1:
            raise OSError(errno.EINVAL, "no")
        if fault == "short" and len(calls) % 2:
            return real(fd, [views[0][:4096]], offset)
        return real(fd, views, offset)

    monkeypatch.setattr(direct, "GROUP", 2 * 8192)
    monkeypatch.setattr(direct.os, "pwritev", pwritev)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    at = 0
    with direct.Stream(fd, expected.size, 4096) as out:
        while (size := int(rng.integers(1, 30_000))) < expected.size - at:
            piece = rng.integers(0, 256, size, np.uint8)
            expected[at : at + size] = piece
            out.skip_to(at)
            out.put(piece)
            piece[:] = 0
            at += size + int(rng.integers(0, 3) * 500)
    os.close(fd)
    assert (tmp_path / "f").read_bytes() == expected.tobytes()
    assert out.digest.digest() == hashlib.sha256(expected).digest()
    assert out.checksums == [crc32c(chunk) for chunk in expected.reshape(-1, 4096)]
    assert max(calls) == 2 * 8192, "several pieces at once"


@pytest.mark.parametrize("codec", ["int8", "nl4", "bf16", "f32"])
def test_embeddings_are_of_their_topics(tmp_path, codec):
    """a^2 = 0.16, b^2 = 0.33, c^2 = 0.51 with 24 of 128 experts; also in the rows of the last, short panel."""
    config = geometry("qwen3_moe", tmp_path / "c.json", hidden_size=1000, vocab_size=500,
                      num_experts=128, num_experts_per_tok=24)  # fmt: skip
    pre = layout(json.loads(config.read_text()), "c", Options(trunk=codec, tokenizer=False))
    tensor = next(tensor for tensor in pre.trunk if tensor.spec.name == "embed")
    blob = np.zeros(tensor.nbytes, np.uint8)
    for at, piece in writer.Synthesis(pre, 0)._parts(pre.trunk.index(tensor), tensor):
        data = piece.reshape(-1).view(np.uint8)
        blob[at : at + data.size] = data
    rows = decode(tensor.codec, blob, 500, 1000)
    alike = rows @ rows.T / 1000
    topic = np.arange(500) % TOPICS
    same = (topic[:, None] == topic) & ~np.eye(500, dtype=bool)
    assert alike.diagonal() == pytest.approx(np.ones(500), abs=0.2)
    assert alike[same].mean() == pytest.approx(0.49, abs=0.06)
    assert alike[same].max() < 0.75, "no two tokens are the same"
    assert alike[topic[:, None] != topic].mean() == pytest.approx(0.16, abs=0.04)
    assert alike[448:, :448][same[448:, :448]].mean() == pytest.approx(0.49, abs=0.06)


def test_presets_have_the_published_sizes():
    def parameters(name: str, layers: int | None = None) -> float:
        config = presets.PRESETS[name]()
        if layers:
            config = presets.cut(config, layers)
        return layout(config, name, Options(experts="nl4", tokenizer=False)).parameters / 1e9

    assert parameters("qwen3-30b-a3b") == pytest.approx(30.53, abs=0.01)
    assert parameters("qwen3.6-35b-a3b") == pytest.approx(34.66, abs=0.01)
    assert parameters("kimi-linear-48b") == pytest.approx(49.12, abs=0.01)
    assert parameters("deepseek-v2-lite") == pytest.approx(15.71, abs=0.01)
    assert parameters("k3-slice", 5) == pytest.approx(4 * 896 * 3 * 3584 * 3072 / 1e9, rel=0.2)
    experts = layout(presets.moonlight(), "m", Options(experts="rvq3", tokenizer=False))
    assert sum(bank.nbytes for bank in experts.banks) == pytest.approx(3.35e9, rel=0.03)
    resident = layout(presets.resident(), "r", Options(experts="int8", tokenizer=False))
    assert resident.output_bytes() == pytest.approx(2.53e9, rel=0.01)


def test_joined_checksums_are_those_of_the_whole():
    data = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    for cut in (0, 1, 64, 9_999, 10_000):
        joined = crc32c_join(crc32c(data[:cut]), crc32c(data[cut:]), data.size - cut)
        assert joined == crc32c(data) == crc32c_numpy(data)
    assert crc32c(b"123456789") == 0xE3069283


def test_tokens_stay_with_a_topic(tmp_path, capsys, headrace):
    ids = np.array(list(islice(topic_chain(10_000, 3), 5000)))
    assert ids.min() >= 0 and ids.max() < 10_000
    kept = np.mean(ids[1:] % TOPICS == ids[:-1] % TOPICS)
    assert 0.95 < kept < 0.98
    config = geometry("qwen3_moe", tmp_path / "small.json", vocab_size=20)
    out = synth(tmp_path / "c", "--geometry", config, "--tokens", 50)
    assert len(ids_of(out)) == 50 and max(ids_of(out)) < 20
    capsys.readouterr()
    assert cli.main([str(out), "--tokens", "50"]) == 0
    assert list(map(int, capsys.readouterr().out.split())) == ids_of(out)


def lru_hits(headrace, routes: np.ndarray, experts: int) -> list[float]:
    """Percent, by an LRU of 12.5, 25 and 50 % of the experts, the first quarter of the tokens uncounted."""
    total, warm_up = routes.shape[1] * experts, routes.shape[0] // 4
    return [
        100 * headrace.simulate(routes, int(total * share), experts=experts, policy="lru",
                                warm_up=warm_up).hit_rate
        for share in (0.125, 0.25, 0.5)
    ]  # fmt: skip


def test_routing_is_as_local_as_in_the_presets(headrace, headrace_bin, tmp_path):
    """The experts of `qwen3-30b-a3b` (128, top 8) on a small stream: hits of its 52, 81 and 95 %.

    Over twelve seeds they were 48 to 55, 76 to 84 and 91 to 95 (deviations 2, 2.1 and 1); a mean of
    three seeds is held to 50, 79 and 93 within 4, 4 and 2.5. Without popular experts they are 41, 68 and
    86, without topics 40, 67 and 91, with tokens in random order 27 to 35, 50 to
    62 and 81 to 90.
    """
    config = geometry(
        "qwen3_moe", tmp_path / "small.json", hidden_size=256, num_experts=128, num_experts_per_tok=8,
        num_hidden_layers=4, moe_intermediate_size=16, vocab_size=16384,
    )  # fmt: skip

    def recorded(ids: Path, container: Path) -> np.ndarray:
        out = tmp_path / "routes.jsonl"
        subprocess.run([headrace_bin, "trace", container, "--ids", ids, "--ctx", "1000", "-o", out],
                       check=True, capture_output=True)  # fmt: skip
        return read_trace(out).routes

    hits, again = [], []
    for seed in (1, 2, 3):
        made = synth(tmp_path / str(seed), "--geometry", config, "--seed", seed, "--tokens", 1000)
        routes = recorded(made / "tokens.txt", made)
        hits.append(lru_hits(headrace, routes, 128))
        before = (routes[1:, :, :, None] == routes[:-1, :, None, :]).any(-1)
        again.append(before.mean())
    for found, expected, within in zip(np.mean(hits, 0), (50, 79, 93), (4, 4, 2.5), strict=True):
        assert found == pytest.approx(expected, abs=within), hits
    assert 0.28 < np.mean(again) < 0.40, "chosen by the token before; 35.5 % in the preset"

    rng = np.random.default_rng(0)
    (tmp_path / "shuffled").write_text(" ".join(map(str, rng.permutation(ids_of(made)))))
    shuffled = lru_hits(headrace, recorded(tmp_path / "shuffled", made), 128)
    uniform = rng.permuted(np.tile(np.arange(128, dtype=np.int32), (1000, 4, 1)), axis=2)[:, :, :8]
    by_chance = lru_hits(headrace, np.ascontiguousarray(uniform), 128)
    assert by_chance == pytest.approx([12, 23, 49], abs=2)
    assert all(np.subtract(hits[-1], shuffled) > (15, 20, 5)), shuffled


def test_mistakes_are_refused(tmp_path, capsys):
    assert cli.main([str(tmp_path / "nothing")]) == 2
    bad = tmp_path / "bad.json"
    bad.write_text('{"model_type": "qwen3_moe", "hidden_size": 0}')
    assert cli.main([str(tmp_path / "c"), "--geometry", str(bad)]) == 3
    assert "hidden_size" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    good = geometry("qwen3_moe", tmp_path / "small.json")
    assert cli.main([str(tmp_path / "full"), "--geometry", str(good)]) == 2
    assert "not empty" in capsys.readouterr().err
