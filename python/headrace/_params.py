"""Arguments in Python's terms turned into the C parameter structs."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _abi
from .errors import UsageError

VERIFY = {"first": _abi.HR_VERIFY_FIRST, "always": _abi.HR_VERIFY_ALWAYS, "off": _abi.HR_VERIFY_OFF}
CACHE_POLICY = {"auto": _abi.HR_CACHE_AUTO, "lru": _abi.HR_CACHE_LRU, "lfu": _abi.HR_CACHE_LFU}
DEFAULT_CTX = 4096

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")


def parse_size(value: int | str | None, name: str = "ram") -> int:
    """Bytes from an int or a text such as "8GiB" or "1.5 GiB"; None and 0 mean "by itself".

    Units are B, KiB, MiB, GiB and TiB. Raises UsageError for anything else.
    """
    if value is None:
        return 0
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match is None or match.group(2).upper() not in _UNITS:
            raise UsageError(f"{name}={value!r} is not a size: use bytes, or a number with KiB, MiB, GiB or TiB")
        value = int(float(match.group(1)) * _UNITS[match.group(2).upper()]
                    if "." in match.group(1) else int(match.group(1)) * _UNITS[match.group(2).upper()])
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int or a str, not {type(value).__name__}")
    return whole(int(value), name, 0, 2**64 - 1)


def whole(value: Any, name: str, low: int, high: int) -> int:
    """`value` as an int within [low, high]; raises UsageError or TypeError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not low <= value <= high:
        raise UsageError(f"{name}={value} is not within {low}..{high}")
    return int(value)


def choice(value: str, name: str, known: dict[str, int]) -> int:
    if value not in known:
        raise UsageError(f"{name}={value!r} is none of {', '.join(map(repr, known))}")
    return known[value]


def path_bytes(path: str | os.PathLike[str]) -> bytes:
    """The path as the operating system takes it. A leading ~ is the home directory, unless a
    file of that very name exists."""
    text = os.fspath(path)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if text.startswith("~") and not os.path.exists(text):
        text = os.path.expanduser(text)
    if "\0" in text:
        raise UsageError("a path cannot contain a zero byte")
    return os.fsencode(text)


LOCK = {"auto": _abi.HR_LOCK_AUTO, "on": _abi.HR_LOCK_ON, "off": _abi.HR_LOCK_OFF}
READ_AHEAD = {"auto": -1, "off": 0}


def path_list(paths: Iterable[str | os.PathLike[str]], name: str) -> tuple[bytes, ...]:
    """Each path as C takes it; raises TypeError for a single one."""
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise TypeError(f"{name} is a list of paths")
    return tuple(path_bytes(path) for path in paths)


def model_params(lib: ctypes.CDLL, *, ram: int | str | None = None, threads: int = 0,
                 ctx: int = DEFAULT_CTX, isa: str = "auto", chunk: int = 0,
                 cache_policy: str = "auto", direct: bool = True, verify: str = "first",
                 io_threads: int = 0, max_sessions: int = 1,
                 shuffle_reads: int = 0,
                 drives: Iterable[str | os.PathLike[str]] = (),
                 read_ahead: int | str = "auto",
                 usage: str | os.PathLike[str] | None = None,
                 lock: str = "auto") -> _abi.hr_model_params:
    """``hr_model_params`` with everything set; the meaning of each stands at ``Model``."""
    params = _abi.hr_model_params()
    lib.hr_model_params_init(ctypes.byref(params))
    most = 2**32 - 1
    params.ram = parse_size(ram)
    # C takes 0 as "4096, or the model's own limit when that is less".
    ctx = whole(ctx, "ctx", 0, most)
    params.ctx = 0 if ctx == DEFAULT_CTX else ctx
    params.threads = whole(threads, "threads", 0, most)
    params.io_threads = whole(io_threads, "io_threads", 0, most)
    params.chunk = whole(chunk, "chunk", 0, most)
    params.max_sessions = whole(max_sessions, "max_sessions", 0, most)
    params.cache_policy = choice(cache_policy, "cache_policy", CACHE_POLICY)
    params.verify = choice(verify, "verify", VERIFY)
    params.direct = 1 if direct else 0
    name = isa.encode("ascii", "replace")
    if len(name) >= 16:
        raise UsageError(f"isa={isa!r} is not known")
    params.isa = name
    params.shuffle_reads = whole(shuffle_reads, "shuffle_reads", 0, most)
    params.read_ahead = (READ_AHEAD[read_ahead] if read_ahead in READ_AHEAD
                         else whole(read_ahead, "read_ahead", 0, 64))
    paths = path_list(drives, "drives")
    # ctypes keeps the array alive with the struct that points to it.
    params.drives = (ctypes.c_char_p * len(paths))(*paths)
    params.drive_count = len(paths)
    params.usage = None if usage is None else path_bytes(usage)
    params.lock = choice(lock, "lock", LOCK)
    return params


def id_array(ids: Iterable[int]) -> NDArray[np.int32]:
    """Token ids as a contiguous int32 vector; raises TypeError or UsageError."""
    if isinstance(ids, (str, bytes)):
        raise TypeError("token ids are integers; tokenize text first")
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError("token ids must be a flat sequence of integers")
    if array.min() < -(2**31) or array.max() >= 2**31:
        raise UsageError("a token id does not fit 32 bits")
    return np.ascontiguousarray(array, dtype=np.int32)


def ids_pointer(array: NDArray[np.int32]):
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


class GenerateParams:
    """``hr_generate_params`` together with the Python objects it points into."""

    def __init__(self, lib: ctypes.CDLL, *, max_tokens: int | None, temperature: float, top_k: int,
                 top_p: float, min_p: float, repetition_penalty: float, seed: int,
                 stop: str | Iterable[str], stop_ids: Iterable[int],
                 ignore_stop_ids: bool) -> None:
        raw = self.raw = _abi.hr_generate_params()
        lib.hr_generate_params_init(ctypes.byref(raw))
        raw.max_tokens = 0 if max_tokens is None else whole(max_tokens, "max_tokens", 1, 2**32 - 1)
        raw.temperature = float(temperature)
        raw.top_k = whole(top_k, "top_k", 0, 2**32 - 1)
        raw.top_p = float(top_p)
        raw.min_p = float(min_p)
        raw.repetition_penalty = float(repetition_penalty)
        raw.seed = whole(seed, "seed", 0, 2**64 - 1)
        raw.ignore_stop_ids = 1 if ignore_stop_ids else 0
        self.stop = [stop] if isinstance(stop, str) else list(stop)
        encoded = [s.encode("utf-8") for s in self.stop]
        if any(b"\0" in s for s in encoded):
            raise UsageError("a stop string cannot contain a zero byte")
        if encoded:
            self._strings = (ctypes.c_char_p * len(encoded))(*encoded)
            raw.stop, raw.stop_count = self._strings, len(encoded)
        self._ids = id_array(stop_ids)
        if self._ids.size:
            raw.stop_ids, raw.stop_id_count = ids_pointer(self._ids), self._ids.size
