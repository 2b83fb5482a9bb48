"""Cases of docs/cases.md about files: cut, lying, damaged, missing; and where they lie."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from case_helpers import convert, limited, run
from containers import crc32c, edit_manifest, make_container, record, write_trunk
from rvq_model import replace_experts
from store_tools import plain_read, reads
from support.build import shared_library
from support.engine import Engine
from tiny_checkpoint import random_weights, split_experts, text_config, write_checkpoint, write_safetensors

SPACE = 2 << 30
"""Address space of a command that reads a hostile file: nothing may be sized from what it says."""


@pytest.fixture(scope="module")
def library(build_dir) -> Path:
    return shared_library(build_dir, "headrace")


@pytest.fixture(scope="module")
def container(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cases") / "c"
    make_container(path, tokenizer=None)
    return path


@pytest.fixture
def copied(container, tmp_path) -> Path:
    return Path(shutil.copytree(container, tmp_path / "c"))


IDS = ["--ids", "1 2 3 4 5 6 7 8", "-n", "2", "--ctx", "32"]


def refused(done: subprocess.CompletedProcess[bytes], code: int = 3) -> str:
    """The one-line reason of a refusal."""
    text = done.stderr.decode()
    assert done.returncode == code, (done.returncode, text)
    assert "Traceback" not in text and text.count("\n") == 1, text
    assert done.stdout == b""
    return text


# ---- sources ----


def test_b01_truncated_files(library, headrace_bin, copied, tmp_path):
    """A source cut by 64 KiB, and every file of a container: refused by name, with both sizes."""
    source = write_checkpoint(tmp_path / "m", weights=split_experts(random_weights(text_config())))
    shard = source / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - 65536)
    done = convert(library, source, tmp_path / "out", "--no-tokenizer", "--quiet")
    text = done.stderr.decode()
    assert done.returncode == 3 and "are present" in text and "needs" in text and str(shard) in text
    assert not (tmp_path / "out").exists()
    for name in ("experts-0001.bin", "trunk.bin", "manifest.json", "manifest.sha256"):
        cut = tmp_path / "cut"
        shutil.copytree(copied, cut)
        size = (cut / name).stat().st_size
        os.truncate(cut / name, size - 5)
        text = refused(run([headrace_bin, "run", cut, *IDS]))
        assert name.split(".")[0] in text
        if name.endswith(".bin"):
            assert str(size) in text and str(size - 5) in text
        shutil.rmtree(cut)


def header_only(path: Path, header: dict, data: bytes = b"", length: int | None = None) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


LIES = {
    "more than the file": ({"a": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4000000]}}, 4, None),
    "end before begin": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}, 8, None),
    "begin beyond the end": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [100, 104]}}, 4, None),
    "product of 2^96": ({"a": {"dtype": "F32", "shape": [1 << 32, 1 << 32, 1 << 32], "data_offsets": [0, 4]}}, 4, None),
    "overlap": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                 "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, 12, None),
    "length 2^63": ({}, 0, 1 << 63),
    "length 0": ({}, 8, 0),
}


@pytest.mark.parametrize("lie", LIES)
def test_b02_headers_that_lie(library, tmp_path, lie):
    """One line, exit 3, and no allocation that believes the number."""
    header, data, length = LIES[lie]
    source = write_checkpoint(tmp_path / "m")
    header_only(source / "model.safetensors", header, bytes(data), length)
    done = convert(library, source, tmp_path / "out", "--no-tokenizer", "--quiet", space=SPACE)
    text = refused(done)
    assert "model.safetensors" in text and not (tmp_path / "out").exists()


# ---- weights that are no numbers ----


def broken(path: Path, change) -> Path:
    """A container whose bytes `change` damages (trunk tensors, record arrays), all sums correct."""
    made = make_container(path, layers=2, experts=4, hidden=32, inner=16, codec="f32", top_k=4, tokenizer=None)
    tensors, weights = dict(made["tensors"]), {k: list(v) for k, v in made["weights"].items()}
    change(tensors, weights)
    trunk = write_trunk(path, {n: ("f64" if n.startswith("rope") else "f32", a) for n, a in tensors.items()})
    sums = {}
    for layer in range(2):
        records = [record("f32", layer, e, *weights[layer, e]) for e in range(4)]
        (path / f"experts-{layer:04d}.bin").write_bytes(b"".join(records))
        sums[layer] = [int.from_bytes(r[60:64], "little") for r in records]

    def manifest(m: dict) -> None:
        m["trunk"] = trunk
        for bank in m["experts"]:
            bank["crc32c"] = sums[bank["layer"]]

    edit_manifest(path, manifest)
    return path


def in_expert(value):
    def change(tensors, weights):
        weights[1, 2][2][:, 3] = value
    return change


def in_tensor(name, value):
    def change(tensors, weights):
        tensors[name] = np.full_like(tensors[name], value)
    return change


@pytest.mark.parametrize("name, change, words", [
    ("NaN in an expert", in_expert(np.nan), ["layer 1", "ffn"]),
    ("infinity in an expert", in_expert(np.inf), ["layer 1", "ffn"]),
    ("NaN in a norm", in_tensor("layers.1.mixer_norm", np.nan), ["layer 1", "mixer"]),
    ("NaN in the embedding", in_tensor("embed", np.nan), ["layer 0"]),
    ("NaN in the head", in_tensor("head", np.nan), ["head"]),
    ("infinity in the final norm", in_tensor("final_norm", np.inf), ["head"]),
], ids=lambda x: x if isinstance(x, str) else "")
def test_b13_weights_that_are_no_numbers(headrace_bin, tmp_path, name, change, words):
    """Evaluation stops and says where; nothing is sampled from such logits."""
    path = broken(tmp_path / "c", change)
    for extra in ([], ["--temp", "1"], ["--isa", "reference", "--chunk", "1"]):
        done = run([headrace_bin, "run", path, *IDS, *extra])
        text = done.stderr.decode()
        assert done.returncode == 3 and done.stdout == b"", (done.returncode, text)
        assert all(w in text for w in words) and "not finite" in text, text


def test_b13_odd_but_sound_weights(headrace_bin, tmp_path):
    """Denormal scales and rows of zeros are numbers like others."""
    def change(tensors, weights):
        weights[0, 1][0][:] = 1e-41
        weights[1, 0][1][:] = 0
        tensors["layers.0.attn.q"][:] = 0

    done = run([headrace_bin, "run", broken(tmp_path / "c", change), *IDS])
    assert done.returncode == 0, done.stderr


# ---- manifests ----


def edit(path: tuple, value: object):
    def change(manifest: dict) -> None:
        at = manifest
        for key in path[:-1]:
            at = at[key]
        if value is ...:
            del at[path[-1]]
        else:
            at[path[-1]] = value
    return change


@pytest.mark.plain_build  # under limits that a checker breaks by itself
@pytest.mark.parametrize("path, value, word", [
    (("model",), ..., "model"), (("trunk", "tensors", 0, "shape"), ..., "shape"), (("model", "layers"), [], "layers"),
    (("model", "layers"), [{"mixer": 0, "ffn": 0}] * 100000, "layers"),
    (("trunk", "tensors", 0, "shape"), [1 << 20, 1 << 20], "tensor"),
    (("trunk", "tensors", 0, "shape"), [96, 0], "shape"), (("model", "hidden_size"), 0, "hidden_size"),
    (("experts", 0, "experts"), 1 << 31, "experts"), (("experts", 0, "hidden"), 0, "hidden"),
    (("model", "ffns", 0, "groups"), 0, "groups"), (("model", "mixers", 0, "kv_heads"), 0, "kv_heads"),
    (("model", "mixers", 0, "head_dim"), 1 << 40, "head_dim"), (("trunk", "bytes"), 1 << 60, "trunk"),
    (("model", "vocab_size"), 1 << 62, "vocab_size"), (("stop_ids",), [96], "stop_ids"),
], ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else None)
def test_b15_impossible_numbers(headrace_bin, copied, path, value, word):
    """Refused by name in every command that opens it; no division by zero, no giant allocation."""
    edit_manifest(copied, edit(path, value))
    for command in (["run", copied, *IDS], ["plan", copied], ["inspect", copied]):
        done = limited([headrace_bin, *command], RLIMIT_AS=SPACE)
        assert word in refused(done)
    assert run([headrace_bin, "verify", copied]).returncode == 3


def test_b15_token_ids_outside_the_vocabulary(headrace_bin, container):
    for ids in ("96", "-1", "2147483647", "1 4294967296"):
        done = run([headrace_bin, "run", container, "--ids", ids, "-n", "1"])
        assert done.returncode in (2, 3) and done.stdout == b"" and done.stderr.count(b"\n") == 1


# ---- one bit ----


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


@pytest.fixture(scope="module")
def rvq(tmp_path_factory) -> Path:
    made = make_container(tmp_path_factory.mktemp("rvq") / "c", layers=2, experts=2, top_k=2, tokenizer=None)
    replace_experts(made, "rvq4x64")
    return Path(made["path"])


@pytest.mark.parametrize("name, at, place, stops", [
    ("experts-0001.bin", 5000, ["layer 1 expert 0"], "run"), ("experts-0001.bin", 17, ["layer 1 expert 0"], "run"),
    ("trunk.bin", 4100, ["trunk.bin", "chunk 0"], "open"), ("manifest.json", 300, ["manifest"], "open"),
    ("codebooks.bin", 3000, ["codebooks.bin"], "open"),
], ids=["payload", "header", "trunk", "manifest", "codebooks"])
def test_b16_one_flipped_bit(headrace_bin, rvq, tmp_path, name, at, place, stops):
    """verify finds it and says where; generation stops with an error that names the file."""
    path = Path(shutil.copytree(rvq, tmp_path / "c"))
    assert run([headrace_bin, "run", path, *IDS]).returncode == 0
    flip(path / name, at)
    found = run([headrace_bin, "verify", path])
    text = (found.stdout + found.stderr).decode()
    assert found.returncode == 3 and all(p in text for p in place), text
    done = run([headrace_bin, "run", path, *IDS])
    assert name.split(".")[0] in refused(done) if stops == "open" else name in done.stderr.decode()
    assert done.returncode == 3 and done.stdout == b""


# ---- file systems and drives ----


@pytest.fixture
def mounted(tmp_path):
    """Callable: (kind of file system, sector bytes) -> a mounted directory; skips loudly."""
    undo: list[list[str]] = []

    def command(*argv: object) -> str:
        try:
            done = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"there is no {argv[0]}")
        if done.returncode != 0:
            pytest.skip(f"{' '.join(map(str, argv))}: {done.stderr.strip()}")
        return done.stdout.strip()

    def mount(kind: str, sector: int = 512) -> Path:
        at = tmp_path / kind
        at.mkdir()
        if kind == "tmpfs":
            command("mount", "-t", "tmpfs", "tmpfs", at)
        elif kind == "overlay":
            base = tmp_path / "base"
            for name in ("lower", "upper", "work"):
                (base / name).mkdir(parents=True)
            command("mount", "-t", "overlay", "overlay", "-o",
                    f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work", at)
        else:
            image = tmp_path / "image"
            with image.open("wb") as file:
                file.truncate(48 << 20)
            loop = command("losetup", "--find", "--show", "--sector-size", sector, image)
            undo.append(["losetup", "--detach", loop])
            command(f"mkfs.{kind}", *(["-q"] if kind == "ext4" else []), loop)
            command("mount", "-t", kind, loop, at)
        undo.append(["umount", str(at)])
        return at

    yield mount
    for argv in reversed(undo):
        subprocess.run(argv, capture_output=True)


@pytest.mark.parametrize("kind, sector", [("tmpfs", 512), ("overlay", 512), ("vfat", 512), ("ext4", 4096)])
def test_b19_file_systems(headrace_bin, container, mounted, kind, sector):
    """Whatever the file system can do, the same tokens; the mode in use is the one that works."""
    want = run([headrace_bin, "run", container, *IDS]).stdout
    path = Path(shutil.copytree(container, mounted(kind, sector) / "c"))
    done = run([headrace_bin, "run", path, *IDS])
    assert done.returncode == 0 and done.stdout == want, done.stderr
    mode = json.loads(run([headrace_bin, "info", path, "--json"]).stdout)["model"]["io_mode"]
    assert mode.startswith(("direct", "buffered"))
    if kind == "tmpfs":
        assert mode.startswith("buffered")


@pytest.fixture
def engine(lib, container):
    opened = Engine(lib, container, ctx=32, threads=1, chunk=1)
    session = opened.session()
    yield opened, session
    opened.c.hr_session_free(session)
    opened.c.hr_model_close(opened.model)


def test_b24_slow_drive_is_left_within_a_read(engine, lib):
    """Asked to stop during a read, it does so within that layer's reads: none of another is begun."""
    opened, session = engine
    layers: list[str] = []

    def read(fd, buffer, offset):
        layers.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(layers) == 1:
            opened.c.hr_cancel(session)
        return plain_read(fd, buffer, offset)

    with reads(lib, read):
        with pytest.raises(RuntimeError, match="cancelled"):
            opened.eval(session, list(range(1, 30)))
    assert len(set(layers)) == 1, layers
    opened.c.hr_session_reset(session)
    opened.eval(session, [1, 2, 3])


def test_b24_removed_drive_is_named(engine, lib):
    """ENODEV from one moment on: an error with the system's words and the file; and back again."""
    opened, session = engine
    with reads(lib, lambda fd, buffer, offset: -errno.ENODEV):
        with pytest.raises(RuntimeError, match=f"experts-0000.bin.*{os.strerror(errno.ENODEV)}"):
            opened.eval(session, [1, 2, 3])
    opened.c.hr_session_reset(session)
    opened.eval(session, [1, 2, 3])
