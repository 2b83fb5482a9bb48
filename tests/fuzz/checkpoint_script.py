"""Hostile checkpoints for the converter: byte strings that say how a sound one is changed.

Any bytes are a script. The first chooses the checkpoint, the second the options; then come edits of
safetensors headers, of config.json and the index, of tensor data and of files as a whole. What the
converter does with the result is checked by `run`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import shutil
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from headrace_tools.convert import cli

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"

#: fixed: scripts of the corpus choose by index
NAMES = ("deepseek_v3_eps", "qwen3_5_moe_eps", "kimi_linear_eps", "gpt_oss", "glm4_moe_air", "deepseek_v3_fp8",
         "kimi_k3_eps", "qwen4_exp", "deepseek_v3_mtp", "qwen3_moe_yarn")
OPTIONS = (
    ("--experts", "int8"), ("--experts", "bf16"), ("--experts", "auto"), ("--experts", "nl4", "--trunk", "nl4"),
    ("--experts", "int4", "--trunk", "bf16"), ("--experts", "mxfp4"), ("--experts", "f32", "--trunk", "f32"),
    ("--plan",),
)
AWKWARD = (
    0, 1, 2, 3, -1, 7, 63, 64, 65, 255, 256, 4096, 65536, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**32,
    2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.5, 1e-6, 1e300, 1e-320, True, False, None, "",
    "x", "BF16", "F32", "F64", "I64", "U8", "F8_E4M3", "F4", "BOOL", [], {}, [0], [1, 2, 3], {"a": 1},
    "nan", "\ud800", "\x00", "../../etc/passwd", "a" * 300, [[[[[]]]]], float("inf"), float("nan"),
)
EXIT_CODES = (0, 2, 3, 5)
"""All but "not enough memory": these checkpoints are tiny."""


class Finding(AssertionError):
    """The converter broke a promise."""


@dataclass
class Script:
    """Consumes a byte string from the front; zeros behind its end."""

    data: bytes
    at: int = 0

    def take(self, count: int) -> int:
        value = int.from_bytes(self.data[self.at : self.at + count], "little")
        self.at += count
        return value

    @property
    def left(self) -> int:
        return max(0, len(self.data) - self.at)


@dataclass
class Files:
    """A checkpoint in memory: JSON files parsed, safetensors as header and data."""

    texts: dict[str, object]
    headers: dict[str, dict[str, object]]
    data: dict[str, bytearray]
    lengths: dict[str, int] = field(default_factory=dict)
    """What a header's length field says instead of the truth."""
    cuts: dict[str, int] = field(default_factory=dict)
    raw: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Bytes of the finished header that are changed: (position, value)."""
    twice: set[str] = field(default_factory=set)
    """Files whose last key is written twice."""


@lru_cache(maxsize=None)
def _read(name: str) -> Files:
    folder = FIXTURES / name
    texts = {f.name: json.loads(f.read_text()) for f in sorted(folder.glob("*.json")) if f.name != "oracle.json"}
    headers, data = {}, {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        headers[file.name] = json.loads(raw[8 : 8 + length])
        data[file.name] = bytearray(raw[8 + length :])
    return Files(texts, headers, data)


def _places(value: object, out: list[tuple[object, object]]) -> None:
    """(container, key) of every value below."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in list(items):
        out.append((value, key))
        _places(below, out)


def _edit_json(root: object, script: Script) -> None:
    places: list[tuple[object, object]] = []
    _places(root, places)
    operation, which = script.take(1), script.take(2)
    if not places:
        return
    holder, key = places[which % len(places)]
    value = holder[key]
    other_holder, other_key = places[script.take(2) % len(places)]
    match operation % 10:
        case 0 | 1:
            holder[key] = copy.deepcopy(AWKWARD[script.take(1) % len(AWKWARD)])
        case 2 if isinstance(value, int) and not isinstance(value, bool):
            holder[key] = value + script.take(1) - 128
        case 3 if isinstance(value, int) and not isinstance(value, bool):
            holder[key] = value << script.take(1) % 70
        case 4:
            del holder[key]
        case 5 if isinstance(holder, dict):
            holder[f"{key}x" if script.take(1) % 2 else str(key)[:-1]] = holder.pop(key)
        case 6:
            holder[key] = copy.deepcopy(other_holder[other_key])
        case 7 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(value))
        case 8:
            for _ in range(script.take(1) % 40):
                holder[key] = [holder[key]]
        case 9 if isinstance(value, int) and not isinstance(value, bool):
            wanted = script.take(1)
            for below, name in places:  # a dimension is the same number in many places
                if type(below[name]) is int and below[name] == value:
                    below[name] = wanted


def _edit_entry(files: Files, shard: str, script: Script) -> None:
    """One tensor's dtype, shape and offsets, sometimes so that they still agree."""
    entries = [e for k, e in files.headers[shard].items() if k != "__metadata__" and isinstance(e, dict)]
    operation, which = script.take(1), script.take(2)
    if not entries:
        return
    entry, other = entries[which % len(entries)], entries[script.take(2) % len(entries)]
    dtypes = ("F32", "BF16", "F16", "F64", "I64", "I32", "U8", "F8_E4M3", "F8_E8M0", "BOOL", "F4", "Q9")
    match operation % 7:
        case 0:
            entry["dtype"] = dtypes[script.take(1) % len(dtypes)]
        case 1:
            entry["data_offsets"] = copy.deepcopy(other.get("data_offsets"))
        case 2 if isinstance(entry.get("shape"), list):
            entry["shape"] = entry["shape"][::-1]
        case 3 if isinstance(entry.get("shape"), list):
            entry["shape"] = [1] * (script.take(1) % 20) + entry["shape"]
        case 4:
            entry["dtype"], entry["shape"], entry["data_offsets"] = "BF16", [], [0, 2]
        case 5:
            entry["shape"] = [2**32, 2**32, script.take(2)]
        case 6:
            entry.update(copy.deepcopy(other))


def _edit(files: Files, script: Script) -> None:
    names = sorted(files.headers)
    shard = names[script.take(1) % len(names)]
    match script.take(1) % 11:
        case 0 | 1:
            _edit_json(files.headers[shard], script)
        case 2 | 3:
            _edit_entry(files, shard, script)
        case 4 | 5:
            texts = sorted(files.texts)
            _edit_json(files.texts[texts[script.take(1) % len(texts)]], script)
        case 6:
            files.lengths[shard] = (0, 1, 7, 2**63, 2**64 - 1, 10**8, 10**8 + 1, script.take(3))[script.take(1) % 8]
        case 7:
            files.cuts[shard] = script.take(3)
        case 8:
            files.raw.setdefault(shard, []).append((script.take(3), script.take(1)))
        case 9:
            data = files.data[shard]
            at = script.take(3) % len(data) & ~1
            for _ in range(script.take(1) % 32 + 1):
                data[at : at + 2] = script.take(2).to_bytes(2, "little")
                at = (at + 64) % len(data) & ~1
        case 10:
            files.twice.add(shard)


def _write(files: Files, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, value in files.texts.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")
    for name, header in files.headers.items():
        text = json.dumps(header)
        if name in files.twice and header:
            key, last = list(header.items())[-1]
            text = text[:-1] + f",{json.dumps(key)}:{json.dumps(last)}}}"
        raw = bytearray(text.encode("utf-8", "surrogatepass"))
        for at, value in files.raw.get(name, ()):
            if raw:
                raw[at % len(raw)] = value
        length = files.lengths.get(name, len(raw))
        whole = length.to_bytes(8, "little") + raw + files.data[name]
        if name in files.cuts:
            whole = whole[: files.cuts[name] % (len(whole) + 1)]
        (folder / name).write_bytes(whole)


def make(data: bytes, folder: Path) -> tuple[str, ...]:
    """Writes the checkpoint that `data` describes; returns the options to convert it with."""
    script = Script(data)
    files = copy.deepcopy(_read(NAMES[script.take(1) % len(NAMES)]))
    options = OPTIONS[script.take(1) % len(OPTIONS)]
    for _ in range(12):
        if script.left == 0:
            break
        _edit(files, script)
    _write(files, folder)
    return options


_FAULT = re.compile(r"headrace-convert: .+\n(  .+\n)*")


def run(data: bytes, work: Path) -> int:
    """Converts the checkpoint of `data` in the directory `work`, which is emptied; the exit code.

    Raises Finding when the converter does anything but convert or refuse: another exception, another
    exit code, no reason, a reason of several lines, or a refusal that leaves something which looks
    like a container.
    """
    shutil.rmtree(work, ignore_errors=True)
    source, target = work / "source", work / "target"
    options = make(data, source)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(source), str(target), "--no-tokenizer", "--quiet", *options])
    text = err.getvalue()
    complete = (target / "manifest.json").exists() and not (target / "conversion.log").exists()
    if code not in EXIT_CODES:
        raise Finding(f"exit code {code}: {text}")
    if code != 0 and not _FAULT.fullmatch(text):
        raise Finding(f"exit code {code} with the reason {text!r}")
    if code != 0 and complete:
        raise Finding(f"refused, but {target} looks complete: {text}")
    if "the engine" in text:
        raise Finding(f"converted, then refused by the engine: {text}")
    if code == 0 and options != ("--plan",) and not complete:
        raise Finding("converted, but nothing is there")
    return code
