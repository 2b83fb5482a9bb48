"""engine/store/{container,manifest,digests,verify}.c: what is refused, and where faults are."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import socket
from pathlib import Path
from typing import Any, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from containers import crc32c, edit_manifest, make_container, write_digests, write_manifest
from store_tools import (CANCELLED, FORMAT, IO, MEMORY, OK, UNSUPPORTED, Container, StoreError,
                         check)

Manifest = dict[str, Any]


def make(path: Path, **options: Any) -> dict[str, Any]:
    return make_container(path, **{"layers": 3, "experts": 3, "hidden": 32, "inner": 16,
                                   "codec": "bf16", "dense": (1,), **options})


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("original") / "c"
    make(path)
    return path


@pytest.fixture
def copied(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "c"))


def refused(lib, path: Path, code: int = FORMAT) -> str:
    """The detail of the error that opening `path` must give."""
    with pytest.raises(StoreError) as caught:
        Container(lib, path).close()
    assert caught.value.code == code, caught.value
    assert "\n" not in caught.value.detail
    return caught.value.detail


def verify(lib, path: Path) -> list[str]:
    """All faults that container_verify reports; checks its totals on the way."""
    ffi, C = lib
    faults, progress = [], []

    @ffi.callback("int32_t(void *, int32_t, const char *, uint64_t, uint64_t)")
    def report(user, fault, text, done, total):
        (faults if fault else progress).append((ffi.string(text).decode(), done, total))
        return 0

    err = ffi.new("hr_error *")
    code = C.container_verify(os.fsencode(path), ffi.NULL, 0, report, ffi.NULL, err)
    assert code == (FORMAT if faults else OK)
    if faults:
        assert err.code == FORMAT and faults[0][0][:500] in ffi.string(err.detail).decode()
    done = [p[1] for p in progress]
    assert done == sorted(done)
    if not faults:
        names = json.loads((path / "manifest.json").read_text())
        total = sum(f.stat().st_size for f in path.iterdir())
        assert done[-1] == progress[-1][2] == total and names
    return [f[0] for f in faults]


def test_what_is_opened(lib, original) -> None:
    ffi, C = lib
    made = json.loads((original / "manifest.json").read_text())
    with Container(lib, original) as c:
        p = c.p
        assert ffi.string(p.path) == os.fsencode(original)
        assert p.bank_count == 2 and [p.banks[i].layer for i in range(2)] == [0, 2]
        for i, bank in enumerate(made["experts"]):
            k = p.banks[i]
            assert ffi.string(k.file).decode() == bank["file"]
            assert (k.experts, k.hidden, k.inner) == (3, 32, 16)
            assert k.record.bytes == bank["record_bytes"]
            assert [k.crc[e] for e in range(3)] == bank["crc32c"]
        assert p.tensor_count == len(made["trunk"]["tensors"])
        for t in made["trunk"]["tensors"]:
            e = C.container_tensor(p, t["name"].encode())
            assert (e.offset, e.bytes, e.cols) == (t["offset"], t["bytes"], t["shape"][-1])
            assert e.rows == (t["shape"][0] if len(t["shape"]) == 2 else 1)
        assert C.container_tensor(p, b"layers.9.attn.q") == ffi.NULL
        assert p.trunk_bytes == (original / "trunk.bin").stat().st_size
        assert p.trunk_chunks == 1
        assert p.trunk_crc[0] == crc32c((original / "trunk.bin").read_bytes())
        assert p.stop_count == 1 and p.stop_ids[0] == 1 and p.parameters == made["parameters"]
        digest = hashlib.sha256((original / "manifest.json").read_bytes()).hexdigest()
        assert ffi.string(p.sha256).decode() == digest
        assert p.total_bytes == sum(f.stat().st_size for f in original.iterdir())
        assert c.budget.used > 0
    assert c.budget.used == 0


def test_reading_a_small_file(lib, original) -> None:
    ffi, C = lib
    err, data, n = ffi.new("hr_error *"), ffi.new("void **"), ffi.new("size_t *")
    with Container(lib, original) as c:
        check(ffi, C.container_read(c.p, b"tokenizer.bin", c.budget, data, n, err), err)
        assert bytes(ffi.buffer(data[0], n[0])) == b"synthetic tokenizer\n"
        C.mem_free(c.budget, data[0], n[0])
        for name in (b"../c/tokenizer.bin", b"/etc/hostname", b".", b"", b"missing.bin", b"a/b"):
            assert C.container_read(c.p, name, c.budget, data, n, err) == FORMAT
            assert data[0] == ffi.NULL


def test_an_ids_only_container(lib, tmp_path) -> None:
    ffi, C = lib
    make(tmp_path / "c", tokenizer=None)
    err, data, n = ffi.new("hr_error *"), ffi.new("void **"), ffi.new("size_t *")
    with Container(lib, tmp_path / "c") as c:
        assert not c.p.has_tokenizer
        assert C.container_read(c.p, b"tokenizer.bin", c.budget, data, n, err) == UNSUPPORTED
    assert verify(lib, tmp_path / "c") == []


@pytest.mark.parametrize("name", ["with space", "é — 模型", "trailing/", "n" * 250,
                                  "/".join(["d" * 200] * 18)])
def test_paths(lib, original, tmp_path, name) -> None:
    """Spaces, other alphabets and long paths are passed on as they are."""
    target = tmp_path / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if name.startswith("d"):
        name = name[: 3900 - len(str(tmp_path)) - 20]
        target = tmp_path / name.rstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(original, target)
    Container(lib, str(target) + ("/" if name.endswith("/") else "")).close()
    assert verify(lib, target) == []
    shutil.rmtree(tmp_path / name.split("/")[0])


def test_a_relative_path_and_a_link_to_the_directory(lib, original, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(original.parent)
    Container(lib, "c").close()
    (tmp_path / "link").symlink_to(original)
    Container(lib, tmp_path / "link").close()


def test_nothing_there(lib, original, tmp_path) -> None:
    assert str(tmp_path / "none") in refused(lib, tmp_path / "none", IO)
    assert "not a directory" in refused(lib, original / "trunk.bin")
    (tmp_path / "empty").mkdir()
    assert "manifest.json: missing" in refused(lib, tmp_path / "empty")
    refused(lib, Path("/" + "x" * 5000), IO)


def test_an_unfinished_conversion(lib, copied) -> None:
    (copied / "conversion.log").write_text("")
    assert "conversion.log" in refused(lib, copied)
    ffi, C = lib
    assert C.container_verify(os.fsencode(copied), ffi.NULL, 0, ffi.NULL, ffi.NULL, ffi.NULL) == FORMAT
    (copied / "conversion.log").unlink()
    (copied / "conversion.log").symlink_to("nowhere")
    assert "conversion.log" in refused(lib, copied)


def test_budget_too_small(lib, original) -> None:
    with Container(lib, original) as c:
        peak = c.budget.peak
    Container(lib, original, peak).close()
    for limit in (1, 1000, peak // 2, peak - 1):
        with pytest.raises(StoreError) as caught:
            Container(lib, original, limit)
        assert caught.value.code == MEMORY


def test_other_files_are_ignored(lib, copied) -> None:
    (copied / "notes.txt").write_text("mine")
    (copied / "sub").mkdir()
    Container(lib, copied).close()
    (copied / "notes.txt").unlink()


# ---- manifest.json ------------------------------------------------------------


def tensor(m: Manifest, name: str) -> Manifest:
    return next(t for t in m["trunk"]["tensors"] if t["name"] == name)


def put(*path: Any) -> Callable[[Manifest], None]:
    """Sets m[path[0]]...[path[-2]] = path[-1]."""
    def change(m: Manifest) -> None:
        node: Any = m
        for key in path[:-2]:
            node = node[key]
        node[path[-2]] = path[-1]
    return change


def drop(*path: Any) -> Callable[[Manifest], None]:
    def change(m: Manifest) -> None:
        node: Any = m
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]
    return change


def cut_crc(m: Manifest) -> None:
    m["experts"][0]["crc32c"].pop()


HOSTILE: list[tuple[str, Callable[[Manifest], Any], tuple[str, ...]]] = [
    ("array", lambda m: [m], ("manifest.json",)),
    ("null", lambda m: [], ("manifest.json",)),
    ("format", put("format", "other"), ("format", "other")),
    ("format kind", put("format", 1), ("format",)),
    ("version 0", put("version", 0), ("version",)),
    ("version text", put("version", "1"), ("version",)),
    ("version real", put("version", 1.5), ("version",)),
    ("unknown key", put("codebooks", {}), ("codebooks",)),
    ("trunk key", put("trunk", "x", 1), ("trunk", "x")),
    ("tensor key", put("trunk", "tensors", 0, "scale", 1), ("embed", "scale")),
    ("bank key", put("experts", 1, "path", "/"), ("experts[1]", "path")),
    ("tokenizer key", put("tokenizer", "path", "/"), ("tokenizer", "path")),
    *((f"no {k}", drop(k), (k,)) for k in ("format", "version", "model", "trunk", "experts",
                                           "tokenizer", "stop_ids", "parameters", "provenance")),
    *((f"no trunk.{k}", drop("trunk", k), ("trunk", k))
      for k in ("file", "bytes", "chunk", "crc32c", "tensors")),
    *((f"no tensor.{k}", drop("trunk", "tensors", 2, k), ("trunk", k))
      for k in ("name",)),
    *((f"no tensor.{k}", drop("trunk", "tensors", 2, k), ("final_norm", k))
      for k in ("codec", "shape", "offset", "bytes")),
    *((f"no bank.{k}", drop("experts", 0, k), ("experts[0]", k))
      for k in ("layer", "file", "codec", "experts", "hidden", "inner", "record_bytes", "crc32c")),
    ("no tokenizer.bytes", drop("tokenizer", "bytes"), ("tokenizer", "bytes")),
    ("model kind", put("model", []), ("model",)),
    ("no vocabulary", drop("model", "vocab_size"), ("vocab_size",)),
    ("provenance kind", put("provenance", "me"), ("provenance",)),
    ("trunk file", put("trunk", "file", "../trunk.bin"), ("trunk", "file")),
    ("trunk bytes 0", put("trunk", "bytes", 0), ("trunk", "bytes")),
    ("trunk bytes odd", lambda m: put("trunk", "bytes", m["trunk"]["bytes"] + 1)(m), ("4096",)),
    ("trunk bytes more", lambda m: put("trunk", "bytes", m["trunk"]["bytes"] + 4096)(m),
     ("trunk.bin", "bytes")),
    ("trunk bytes huge", put("trunk", "bytes", 2**62), ("trunk", "bytes")),
    ("trunk bytes 2^60", put("trunk", "bytes", 2**60), ("crc32c",)),
    ("trunk bytes negative", put("trunk", "bytes", -4096), ("trunk", "bytes")),
    ("trunk bytes beyond int64", put("trunk", "bytes", 2**64 + 4096), ("manifest.json",)),
    ("chunk", put("trunk", "chunk", 0), ("chunk",)),
    ("crc count", put("trunk", "crc32c", []), ("crc32c",)),
    ("crc range", put("trunk", "crc32c", 0, 2**32), ("crc32c[0]",)),
    ("crc negative", put("trunk", "crc32c", 0, -1), ("crc32c[0]",)),
    ("crc kind", put("trunk", "crc32c", 0, "0"), ("crc32c[0]",)),
    ("tensors kind", put("trunk", "tensors", {}), ("tensors",)),
    ("tensor kind", put("trunk", "tensors", 3, None), ("trunk.tensors[3]",)),
    ("tensor name empty", put("trunk", "tensors", 0, "name", ""), ("tensors[0]", "name")),
    ("tensor name long", put("trunk", "tensors", 0, "name", "n" * 128), ("tensors[0]", "name")),
    ("tensor name control", put("trunk", "tensors", 0, "name", "a\nb\x1b[31m"),
     ("tensors[0]", "name")),
    ("tensor name nul", put("trunk", "tensors", 0, "name", "embed\0x"), ("tensors[0]", "name")),
    ("tensor twice", put("trunk", "tensors", 0, "name", "head"), ("head", "twice")),
    ("codec", put("trunk", "tensors", 0, "codec", "rvq"), ("embed", "rvq")),
    ("codec none", put("trunk", "tensors", 0, "codec", "none"), ("embed", "none")),
    ("codec other", put("trunk", "tensors", 0, "codec", "int8"), ("embed", "bytes")),
    ("shape []", put("trunk", "tensors", 0, "shape", []), ("embed", "shape")),
    ("shape 4d", put("trunk", "tensors", 0, "shape", [1, 1, 96, 32]), ("embed", "shape")),
    ("stack of two", put("trunk", "tensors", 0, "shape", [2, 96, 32]), ("embed", "bytes")),
    ("shape 0", put("trunk", "tensors", 0, "shape", [0, 32]), ("embed", "shape[0]")),
    ("shape -1", put("trunk", "tensors", 0, "shape", [96, -32]), ("embed", "shape[1]")),
    ("shape real", put("trunk", "tensors", 0, "shape", [96.5, 32]), ("embed", "shape[0]")),
    ("shape huge", put("trunk", "tensors", 0, "shape", [2**31 - 1, 2**31 - 1]), ("embed",)),
    ("shape wraps", put("trunk", "tensors", 0, "shape", [2**31, 2**31]), ("embed", "shape[0]")),
    ("shape million", put("trunk", "tensors", 0, "shape", [2**20, 2**20]), ("embed", "bytes")),
    ("offset odd", put("trunk", "tensors", 0, "offset", 64), ("embed", "offset")),
    ("offset negative", put("trunk", "tensors", 0, "offset", -4096), ("embed", "offset")),
    ("offset far", put("trunk", "tensors", 0, "offset", 2**40), ("embed", "trunk.bin")),
    ("offset overlap", put("trunk", "tensors", 1, "offset", 0), ("head", "offset")),
    ("offset order", lambda m: m["trunk"]["tensors"].reverse(), ("offset",)),
    ("bytes", put("trunk", "tensors", 0, "bytes", 1), ("embed", "bytes")),
    ("bytes huge", put("trunk", "tensors", 0, "bytes", 2**63 - 1), ("embed", "bytes")),
    ("experts kind", put("experts", {}), ("experts",)),
    ("bank kind", put("experts", 1, 7), ("experts[1]",)),
    ("bank order", lambda m: m["experts"].reverse(), ("layer 0",)),
    ("bank twice", lambda m: m["experts"].append(copy.deepcopy(m["experts"][1])), ("ascending",)),
    ("layer", put("experts", 1, "layer", 3), ("experts[1]", "file")),
    ("layer huge", put("experts", 1, "layer", 2**32), ("layer",)),
    ("bank file", put("experts", 0, "file", "/etc/passwd"), ("experts[0]", "file")),
    ("bank file up", put("experts", 0, "file", "../experts-0000.bin"), ("experts[0]", "file")),
    ("bank file swapped", put("experts", 0, "file", "experts-0002.bin"), ("experts[0]", "file")),
    ("activations", put("experts", 0, "activations", 15), ("experts[0]", "activations", "8 or 22")),
    ("activations kind", put("experts", 0, "activations", "22"), ("experts[0]", "activations")),
    ("activations codec", put("experts", 1, "activations", 22), ("experts[1]", "mxfp4, not")),
    ("bank codec f64", put("experts", 0, "codec", "f64"), ("experts[0]", "f64")),
    ("bank codec", put("experts", 0, "codec", "f32"), ("experts[0]", "record_bytes")),
    ("bank codec unknown", put("experts", 0, "codec", "mxfp9"), ("experts[0]", "mxfp9")),
    ("experts 0", put("experts", 0, "experts", 0), ("experts[0]", "experts")),
    ("experts more", put("experts", 0, "experts", 4), ("experts[0]", "crc32c")),
    ("experts huge", put("experts", 0, "experts", 2**31 - 1), ("experts[0]", "crc32c")),
    ("hidden 0", put("experts", 0, "hidden", 0), ("experts[0]", "hidden")),
    ("hidden huge", put("experts", 0, "hidden", 2**31 - 1), ("experts[0]",)),
    ("both huge", lambda m: m["experts"][0].update(hidden=2**31 - 1, inner=2**31 - 1),
     ("experts[0]",)),
    ("inner", put("experts", 0, "inner", 4000), ("experts[0]", "record_bytes")),
    ("record 0", put("experts", 0, "record_bytes", 0), ("experts[0]", "record_bytes")),
    ("record more", put("experts", 0, "record_bytes", 65536), ("experts[0]", "record_bytes")),
    ("crc short", cut_crc, ("experts[0]", "crc32c")),
    ("crc of bank", put("experts", 0, "crc32c", 1, 0.5), ("experts[0]", "crc32c[1]")),
    ("tokenizer kind", put("tokenizer", 5), ("tokenizer",)),
    ("tokenizer file", put("tokenizer", "file", "trunk.bin"), ("tokenizer", "file")),
    ("tokenizer bytes", put("tokenizer", "bytes", 5), ("tokenizer.bin", "bytes")),
    ("tokenizer bytes 0", put("tokenizer", "bytes", 0), ("tokenizer", "bytes")),
    ("stop id", put("stop_ids", [96]), ("stop_ids[0]",)),
    ("stop id negative", put("stop_ids", [0, -1]), ("stop_ids[1]",)),
    ("stop id kind", put("stop_ids", ["1"]), ("stop_ids[0]",)),
    ("stop ids", put("stop_ids", [1] * 17), ("stop_ids",)),
    ("stop ids kind", put("stop_ids", None), ("stop_ids",)),
    ("vocabulary 0", put("model", "vocab_size", 0), ("vocab_size",)),
    ("parameters", put("parameters", 10**15), ("parameters",)),
    ("parameters negative", put("parameters", -1), ("parameters",)),
    ("parameters kind", put("parameters", "many"), ("parameters",)),
]


@pytest.mark.parametrize(("change", "words"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
def test_hostile_manifests_are_refused_by_name(lib, copied, change, words) -> None:
    edit_manifest(copied, change)
    detail = refused(lib, copied)
    assert all(w in detail for w in words), detail
    assert any(words[-1] in f or detail[:60] in f for f in verify(lib, copied))


def test_a_newer_version(lib, copied) -> None:
    edit_manifest(copied, lambda m: m.update(version=2, novelty={}))
    assert "newer" in refused(lib, copied, UNSUPPORTED)


TEXTS = {
    "empty": b"", "blank": b" \n", "no json": b"hello", "cut": b'{"format": "headrace',
    "bom": b"\xef\xbb\xbf{}", "utf8": b'{"format": "\xff\xfe"}', "deep": b"[" * 100000,
    "deep 17": b"[" * 17 + b"]" * 17, "twice": b'{"format": "a", "format": "b"}',
    "tail": b"{} {}", "nan": b'{"version": NaN}', "comment": b"{/**/}", "nul": b"{}\0",
    "number": b'{"version": 1e999}', "large": b'{"a": "' + b"x" * (16 << 20) + b'"}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_texts_that_are_no_manifest(lib, copied, text) -> None:
    (copied / "manifest.json").write_bytes(text)
    write_digests(copied)
    assert "manifest.json" in refused(lib, copied)
    assert any("manifest.json" in f for f in verify(lib, copied))


def test_a_changed_manifest(lib, copied) -> None:
    text = (copied / "manifest.json").read_text()
    (copied / "manifest.json").write_text(text.replace('"synthetic"', '"synthetiC"', 1))
    assert "SHA-256" in refused(lib, copied) and "manifest.json" in refused(lib, copied)
    assert [f for f in verify(lib, copied) if f.startswith("manifest.json: its SHA-256")]


_json = st.recursive(st.none() | st.booleans() | st.integers(-2**64, 2**64) | st.text(max_size=8)
                     | st.sampled_from([0, 1, -1, 4096, 2**31, 2**32, 2**62, "int8", "f64"]),
                     lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8), x,
                                                                         max_size=4), max_leaves=6)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_change_is_harmless(lib, original, tmp_path_factory, data) -> None:
    """Random surgery on the manifest: an error or a container, never a crash or a leak."""
    path = tmp_path_factory.getbasetemp() / "surgery"
    if not path.exists():
        shutil.copytree(original, path)
    manifest = json.loads((original / "manifest.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = manifest
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(node[key], (dict, list)) and data.draw(st.integers(0, 4)):
                node = node[key]
                continue
            if data.draw(st.booleans()):
                node[key] = data.draw(_json)
            else:
                del node[key]
            break
    write_manifest(path, manifest)
    try:
        c = Container(lib, path)
    except StoreError as error:
        assert error.code in (FORMAT, UNSUPPORTED) and error.detail
    else:
        c.close()
        assert c.budget.used == 0


# ---- manifest.sha256 ------------------------------------------------------------


def lines(path: Path) -> list[str]:
    return (path / "manifest.sha256").read_text().splitlines(keepends=True)


BROKEN_LISTS: dict[str, Callable[[list[str]], str]] = {
    "empty": lambda x: "",
    "no newline": lambda x: "".join(x)[:-1],
    "one space": lambda x: x[0].replace("  ", " ") + "".join(x[1:]),
    "binary mark": lambda x: x[0].replace("  ", " *") + "".join(x[1:]),
    "not hex": lambda x: "g" + "".join(x)[1:],
    "short": lambda x: x[0][1:] + "".join(x[1:]),
    "path": lambda x: "".join(x) + "0" * 64 + "  zz/../x\n",
    "hidden": lambda x: "0" * 64 + "  .profile\n" + "".join(x),
    "order": lambda x: "".join(reversed(x)),
    "twice": lambda x: x[0] + "".join(x),
    "itself": lambda x: "".join(x[:-2]) + "0" * 64 + "  manifest.sha256\n" + "".join(x[-2:]),
    "blank line": lambda x: "".join(x) + "\n",
    "return": lambda x: "".join(x).replace("\n", "\r\n"),
    "long name": lambda x: "".join(x) + "0" * 64 + "  z" + "z" * 128 + "\n",
    "no manifest": lambda x: "".join(y for y in x if "manifest.json" not in y),
}


@pytest.mark.parametrize("change", BROKEN_LISTS.values(), ids=BROKEN_LISTS.keys())
def test_broken_lists(lib, copied, change) -> None:
    (copied / "manifest.sha256").write_text(change(lines(copied)), newline="")
    assert "manifest.sha256" in refused(lib, copied)
    assert any("manifest.sha256" in f for f in verify(lib, copied))


def test_upper_case_digits_are_digits(lib, copied) -> None:
    text = "".join(x[:64].upper() + x[64:] for x in lines(copied))
    (copied / "manifest.sha256").write_text(text)
    Container(lib, copied).close()
    assert verify(lib, copied) == []


def test_lists_that_miss_or_invent_files(lib, copied) -> None:
    before = lines(copied)
    (copied / "manifest.sha256").write_text("".join(x for x in before if "experts-0002" not in x))
    assert verify(lib, copied) == ["manifest.sha256: does not list experts-0002.bin"]
    (copied / "zebra.bin").write_bytes(b"stripes")
    write_digests(copied)
    assert verify(lib, copied) == [
        "manifest.sha256: lists zebra.bin, which is no part of the container"]
    (copied / "zebra.bin").unlink()
    assert len(verify(lib, copied)) == 2


# ---- files ------------------------------------------------------------------------

FILES = ["manifest.json", "manifest.sha256", "trunk.bin", "experts-0000.bin", "experts-0002.bin",
         "tokenizer.bin"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(lib, copied, name) -> None:
    (copied / name).unlink()
    assert f"{name}: missing" in refused(lib, copied)
    assert any(f.startswith(f"{name}: missing") for f in verify(lib, copied))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "directory", "socket", "device"])
def test_only_regular_files(lib, copied, name, kind, tmp_path) -> None:
    f = copied / name
    f.rename(tmp_path / "elsewhere")
    if kind == "symlink":
        f.symlink_to(tmp_path / "elsewhere")
    elif kind == "dangling":
        f.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(f)
    elif kind == "directory":
        f.mkdir()
    elif kind == "socket":
        previous = os.getcwd()
        os.chdir(copied)
        try:
            socket.socket(socket.AF_UNIX).bind(name)
        finally:
            os.chdir(previous)
    else:
        try:
            os.mknod(f, 0o600 | 0o020000, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("making a device needs a privilege")
    detail = refused(lib, copied)
    assert detail.startswith(name) and ("link" in detail or "not a regular file" in detail)
    assert any(x.startswith(name) for x in verify(lib, copied))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [-1, 1, -4096, "empty"])
def test_wrong_lengths(lib, copied, name, change) -> None:
    size = (copied / name).stat().st_size
    os.truncate(copied / name, max(0, size + change) if change != "empty" else 0)
    detail = refused(lib, copied)
    assert "manifest." in detail or name in detail
    assert any(name in f for f in verify(lib, copied))


def flip(path: Path, at: int, mask: int = 0x40) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ mask]))


def test_an_untouched_container_is_whole(lib, original) -> None:
    assert verify(lib, original) == []


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_is_found(lib, copied, name) -> None:
    size = (copied / name).stat().st_size
    rng = random.Random(name)
    for at in {0, size - 1, *(rng.randrange(size) for _ in range(6))}:
        flip(copied / name, at)
        faults = verify(lib, copied)
        assert any(name in f for f in faults), (at, faults)
        flip(copied / name, at)
    assert verify(lib, copied) == []


def test_an_expert_fault_has_its_place(lib, copied, original) -> None:
    size = json.loads((original / "manifest.json").read_text())["experts"][1]["record_bytes"]
    for at, word in ((100, "CRC32C"), (12, "expert in the header"), (size - 1, "padding"),
                     (0, "magic"), (61, "checksum in the header")):
        flip(copied / "experts-0002.bin", 2 * size + at)
        faults = verify(lib, copied)
        place = [f for f in faults if "layer 2 expert 2" in f and word in f]
        assert place and f"experts-0002.bin: layer 2 expert 2" in place[0], faults
        assert all("expert 0" not in f and "expert 1" not in f for f in faults)
        flip(copied / "experts-0002.bin", 2 * size + at)


def test_faults_are_all_reported(lib, copied, original) -> None:
    size = json.loads((original / "manifest.json").read_text())["experts"][0]["record_bytes"]
    flip(copied / "experts-0000.bin", 500)
    flip(copied / "experts-0000.bin", 2 * size + 500)
    flip(copied / "experts-0002.bin", size + 500)
    flip(copied / "tokenizer.bin", 3)
    faults = "\n".join(verify(lib, copied))
    for place in ("layer 0 expert 0", "layer 0 expert 2", "layer 2 expert 1", "tokenizer.bin"):
        assert place in faults
    assert "layer 0 expert 1" not in faults and "trunk.bin" not in faults


def test_a_cut_bank_names_the_first_missing_expert(lib, copied, original) -> None:
    size = json.loads((original / "manifest.json").read_text())["experts"][0]["record_bytes"]
    os.truncate(copied / "experts-0000.bin", size + 100)
    faults = verify(lib, copied)
    assert any("layer 0 expert 1" in f and str(size) in f for f in faults)
    assert any(f"has {size + 100} bytes" in f for f in faults)


def test_a_trunk_fault_names_chunk_and_tensors(lib, tmp_path) -> None:
    """More than one chunk: the fault is put into the right one."""
    path = tmp_path / "c"
    make(path, vocab=12000)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (path / "trunk.bin").stat().st_size > 2 << 20
    assert verify(lib, path) == []
    head = tensor(manifest, "head")
    chunk = (head["offset"] + head["bytes"]) >> 20  # the one in which head ends
    flip(path / "trunk.bin", (chunk << 20) + 5)
    faults = verify(lib, path)
    assert any(f"chunk {chunk} " in f and "head" in f and "embed" not in f for f in faults), faults


def test_padding_that_is_not_zero_but_signed(lib, copied) -> None:
    """Gaps must be zero even where every checksum agrees."""
    manifest = json.loads((copied / "manifest.json").read_text())
    trunk = bytearray((copied / "trunk.bin").read_bytes())
    norm = tensor(manifest, "final_norm")
    trunk[norm["offset"] + norm["bytes"] + 7] = 1
    (copied / "trunk.bin").write_bytes(trunk)
    edit_manifest(copied, put("trunk", "crc32c", [crc32c(bytes(trunk))]))
    place = norm["offset"] + norm["bytes"] + 7
    assert verify(lib, copied) == [f"trunk.bin: byte {place} lies between tensors and is not zero"]

    bank = manifest["experts"][0]
    size = bank["record_bytes"]
    data = bytearray((copied / "experts-0000.bin").read_bytes())
    data[2 * size - 1] = 1
    record = data[size : 2 * size]
    record[60:64] = bytes(4)
    crc = crc32c(bytes(record))
    data[size + 60 : size + 64] = crc.to_bytes(4, "little")
    (copied / "experts-0000.bin").write_bytes(data)
    edit_manifest(copied, put("experts", 0, "crc32c", 1, crc))
    faults = verify(lib, copied)
    assert any(f"layer 0 expert 1: byte {2 * size - 1}" in f for f in faults) and len(faults) == 2


def test_verify_can_be_stopped(lib, original) -> None:
    ffi, C = lib
    calls = []

    @ffi.callback("int32_t(void *, int32_t, const char *, uint64_t, uint64_t)")
    def stop(user, fault, text, done, total):
        calls.append(done)
        return 1

    assert C.container_verify(os.fsencode(original), ffi.NULL, 0, stop, ffi.NULL, ffi.NULL) == CANCELLED
    assert len(calls) == 1


def test_verify_of_nothing(lib, tmp_path) -> None:
    ffi, C = lib
    err = ffi.new("hr_error *")
    assert C.container_verify(os.fsencode(tmp_path / "none"), ffi.NULL, 0, ffi.NULL, ffi.NULL, err) == IO
    (tmp_path / "empty").mkdir()
    assert len(verify(lib, tmp_path / "empty")) >= 2
