"""Files whose checksums are right and whose content is not: regressions of what was found."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from containers import crc32c, edit_manifest, make_container
from support.engine import Engine

NAN, INF = float("nan"), float("inf")


# ---- session files ----


@pytest.fixture(scope="module")
def ngram(fixture_models) -> Path:
    """A model whose sessions remember token ids."""
    return fixture_models("qwen4_exp")


def rewritten(data: bytes, vocab: int, history: list[list[float]], old: list[float]) -> bytes:
    """The pieces that hold exactly `old` get the values `history`, and their checksum."""
    raw = bytearray(data)
    want = np.array(old, "<f4").tobytes()
    for values in history:
        at = raw.find(want + struct.pack("<II", crc32c(want), 0))
        assert at > 0, "the history is not where it is looked for"
        new = np.array(values, "<f4").tobytes()
        raw[at : at + len(new) + 4] = new + struct.pack("<I", crc32c(new))
    return bytes(raw)


@pytest.mark.parametrize("value", [1e30, NAN, INF, -INF, 0.5, -2.0, -1.5, 131.0, 2.0**31, 2.0**40])
def test_a_history_that_holds_no_tokens(lib, ngram, tmp_path, value):
    """No float that is no token id becomes an integer; the session is as it was."""
    engine = Engine(lib, ngram, ctx=32)
    session = engine.session()
    try:
        engine.eval(session, [5, 6, 7, 8, 9])
        engine.save(session, tmp_path / "good")
        manifest = json.loads((ngram / "manifest.json").read_text())
        order = manifest["model"]["ngram"]["order"]
        old = [5.0, 6.0, 7.0, 8.0, 9.0][-(order - 1) :]
        bad = rewritten((tmp_path / "good").read_bytes(), engine.vocab, [[*old[:-1], value]], old)
        (tmp_path / "bad").write_bytes(bad)
        want = engine.eval(session, [11])
        engine.load(session, tmp_path / "good")
        with pytest.raises(RuntimeError, match="no token ids"):
            engine.load(session, tmp_path / "bad")
        assert engine.eval(session, [11]) == want
        engine.load(session, tmp_path / "good")
        start = rewritten((tmp_path / "good").read_bytes(), engine.vocab, [[-1.0] * len(old)], old)
        (tmp_path / "start").write_bytes(start)
        engine.load(session, tmp_path / "start")  # before the start: that is a value
    finally:
        engine.c.hr_session_free(session)
        engine.c.hr_model_close(engine.model)


# ---- numbers that are not finite ----


def test_logits_are_finite_or_an_error(lib, tmp_path, headrace):
    """Also for callers that sample themselves: hr_eval never hands out a NaN."""
    made = make_container(tmp_path / "c", tokenizer=None)
    manifest = made["manifest"]
    head = next(t for t in manifest["trunk"]["tensors"] if t["name"] == "head")
    trunk = bytearray((tmp_path / "c" / "trunk.bin").read_bytes())
    trunk[head["offset"] : head["offset"] + 4] = np.float32(NAN).tobytes()
    (tmp_path / "c" / "trunk.bin").write_bytes(trunk)
    edit_manifest(tmp_path / "c", lambda m: m["trunk"].update(crc32c=[crc32c(bytes(trunk))]))
    with headrace.Model(tmp_path / "c", ctx=16) as model:
        with pytest.raises(headrace.NumericError, match="head"):
            model.logits([1, 2, 3])


# ---- manifests ----


def test_verify_asks_whether_it_is_a_model(headrace, tmp_path):
    """Every sum is right and the description impossible: not "ok"."""
    make_container(tmp_path / "c", tokenizer=None)
    assert headrace.verify(tmp_path / "c") == []
    for number, change in enumerate((lambda m: m["model"].update(hidden_size=63),
                                     lambda m: m["model"]["mixers"][0].update(heads=0),
                                     lambda m: m["trunk"]["tensors"][0].update(name="embedding"))):
        path = Path(shutil.copytree(tmp_path / "c", tmp_path / f"d{number}"))
        edit_manifest(path, change)
        assert len(headrace.verify(path)) == 1
    newer = Path(shutil.copytree(tmp_path / "c", tmp_path / "newer"))
    edit_manifest(newer, lambda m: m["model"]["mixers"][0].update(kind="other"))
    with pytest.raises(headrace.UnsupportedError, match="not known to this version"):
        headrace.verify(newer)
    make_container(tmp_path / "e", tokenizer=b"no tokenizer at all")
    assert any("tokenizer.bin" in fault for fault in headrace.verify(tmp_path / "e"))


def test_a_state_beyond_all_memory_is_counted_so(headrace, tmp_path):
    """1,024 layers whose keys and values for 2^27 tokens exceed 2^64 bytes: no sum wraps round."""
    made = make_container(tmp_path / "c", tokenizer=None)
    manifest = made["manifest"]
    heads, dim, layers, hidden = 4096, 4096, 1024, 1
    model = manifest["model"]
    model |= {"hidden_size": hidden, "max_position": 1 << 27, "layers": [{"mixer": 0, "ffn": 0}] * layers}
    model["mixers"][0] |= {"heads": heads, "kv_heads": heads, "head_dim": dim, "rotary_dim": 0, "rope": None}
    model["ffns"] = [{"kind": "dense", "inner": 1, "activation": "silu_glu"}]
    q, tensors, offset = heads * dim, [], 0

    def tensor(name: str, *shape: int) -> None:
        nonlocal offset
        size = 4 * int(np.prod(shape))
        tensors.append({"name": name, "codec": "f32", "shape": list(shape), "offset": offset, "bytes": size})
        offset += -(-size // 4096) * 4096

    for name, *shape in (("embed", 96, hidden), ("head", 96, hidden), ("final_norm", hidden)):
        tensor(name, *shape)
    for layer in range(layers):
        for name, *shape in (("mixer_norm", hidden), ("ffn_norm", hidden), ("attn.q", q, hidden), ("attn.k", q, hidden),
                             ("attn.v", q, hidden), ("attn.o", hidden, q), ("ffn.gate", 1, hidden),
                             ("ffn.up", 1, hidden), ("ffn.down", hidden, 1)):
            tensor(f"layers.{layer}.{name}", *shape)
    manifest |= {"experts": [], "parameters": 0}
    manifest["trunk"] |= {"bytes": offset, "crc32c": [0] * -(-offset // (1 << 20)), "tensors": tensors}
    text = json.dumps(manifest).encode()
    for sessions in (1, 64):
        plan = headrace.plan_manifest(text, ctx=1 << 27, max_sessions=sessions, ram="1TiB")
        assert not plan.fits and plan.floor >= 1 << 56 and plan.state >= 1 << 56
    assert headrace.plan_manifest(text, ctx=64).state == layers * 2 * 64 * q * 4


# ---- where files may lie ----


@pytest.mark.parametrize("name", ["codebooks.bin", "ngram.bin", "experts-0000.bin", "trunk.bin"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_regular_files_beneath_the_directory(headrace, ngram, rvq, tmp_path, name, kind):
    """No link leads out, nothing is opened that could block: also the files only some containers have."""
    import os

    source = rvq if name == "codebooks.bin" else ngram
    path = Path(shutil.copytree(source, tmp_path / "c"))
    (path / name).rename(tmp_path / "away")
    if kind == "link":
        (path / name).symlink_to(tmp_path / "away")
    else:
        os.mkfifo(path / name)
    with pytest.raises(headrace.FormatError, match=f"{name}: is (a symbolic link|not a regular file)"):
        headrace.Model(path, ctx=16)
    assert any(fault.startswith(f"{name}: is ") for fault in headrace.verify(path))


@pytest.fixture(scope="module")
def rvq(tmp_path_factory) -> Path:
    from rvq_model import replace_experts

    made = make_container(tmp_path_factory.mktemp("rvq") / "c", tokenizer=None)
    replace_experts(made, "rvq4x64")
    return Path(made["path"])


@pytest.mark.parametrize("name", ["../trunk.bin", "/etc/passwd", "trunk.bin/", ".hidden", "a b", "ž.bin", "x" * 129, "", "trunk.bin\0x"])
def test_names_from_a_strict_alphabet(headrace, tmp_path, name):
    """In the manifest and in the list of digests; nothing is opened by such a name."""
    make_container(tmp_path / "c", tokenizer=None)
    edit_manifest(tmp_path / "c", lambda m: m["trunk"].update(file=name))
    with pytest.raises(headrace.FormatError):
        headrace.Model(tmp_path / "c")
    make_container(tmp_path / "d", tokenizer=None)
    sums = tmp_path / "d" / "manifest.sha256"
    sums.write_bytes(f"{'0' * 64}  {name}\n".encode() + sums.read_bytes())
    with pytest.raises(headrace.FormatError, match="line 1"):
        headrace.Model(tmp_path / "d")
    assert headrace.verify(tmp_path / "d")


def test_parts_that_belong_to_no_layer(headrace, tmp_path):
    """Nothing in the files would bound their dimensions."""
    for number, (key, size) in enumerate((("mixers", "head_dim"), ("ffns", "inner"))):
        path = tmp_path / f"c{number}"
        make_container(path, tokenizer=None)

        def change(manifest: dict, key: str = key, size: str = size) -> None:
            manifest["model"][key].append({**manifest["model"][key][0], size: 4096})

        edit_manifest(path, change)
        with pytest.raises(headrace.FormatError, match=rf"{key}\[1\] belongs to no layer"):
            headrace.Model(path)


# ---- what a terminal would obey ----


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "\x7f", "\x9b31m", "\x00"])
def test_no_control_character_reaches_a_terminal(headrace, headrace_bin, tmp_path, text):
    """Names from a manifest are printed: they are refused, or shown harmless."""
    import subprocess

    for number, place in enumerate(("name", "family")):
        path = tmp_path / f"c{number}"
        make_container(path, tokenizer=None)
        edit_manifest(path, lambda m: (m["model"] if place == "name" else m["provenance"]).update({place: text}))
        for command in (["inspect", path], ["info", path], ["plan", path], ["verify", path]):
            done = subprocess.run([str(headrace_bin), *map(str, command)], capture_output=True)
            said = (done.stdout + done.stderr).decode()
            assert not [c for c in said if c != "\n" and (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0)], repr(said)
            assert done.returncode == (3 if place == "name" else 0)


def test_errors_hold_no_control_characters(headrace):
    with pytest.raises(headrace.HeadraceError) as caught:
        headrace.Model("no \x1b[2J such \x9b2J \x7f\n directory")
    assert not [c for c in caught.value.detail if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0]
