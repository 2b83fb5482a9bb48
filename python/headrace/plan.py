"""Questions about a container that need no open model: will it fit, is it whole."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from . import _abi
from ._params import model_params, path_bytes, path_list
from ._worker import Worker
from .errors import from_status


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model needs, from its manifest alone. Sizes are bytes.

    Attributes:
        trunk, state, scratch, io, overhead: parts that are always held; `state` and `scratch`
            are for all sessions of `max_sessions`.
        cache: what `ram` leaves for experts, and `cache_slots` how many experts that is.
        total: the sum of all these; never above `ram`.
        floor: the smallest `ram` that opens.
        recommended: the `ram` that holds the whole model, or the default if that is less.
        ram: the budget planned for; `available`: usable memory found on this machine.
        record_bytes: one expert; `working_set`: layers x top_k experts.
        bytes_per_token_cold: read from disk for a decoded token when nothing is cached.
        fits: floor <= ram.
        trunk_per_token, experts_per_token, state_per_token, state_per_position: bytes that decoding
            a token reads from memory: resident weights, experts, recurrent state, and attention
            state for every token before it.
        layers, moe_layers, experts, top_k: the last two are the largest of a layer.
        trunk_rows, trunk_cols, expert_width, expert_inner: shapes of what is read most.
        threads, io_threads: as chosen.
        trunk_codec, expert_codec: those that hold most bytes; "none" without experts.
        expert_activations: bits of those that the experts meet, 22 or 8; 0: float32, or no experts.
        shared_per_token: of `trunk_per_token`, the experts of every token, computed while others are read.
    """

    trunk: int
    state: int
    scratch: int
    io: int
    overhead: int
    cache: int
    total: int
    floor: int
    recommended: int
    ram: int
    available: int
    record_bytes: int
    working_set: int
    bytes_per_token_cold: int
    cache_slots: int
    total_experts: int
    ctx: int
    chunk: int
    fits: bool
    trunk_per_token: int
    experts_per_token: int
    state_per_token: int
    state_per_position: int
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    trunk_rows: int
    trunk_cols: int
    expert_width: int
    expert_inner: int
    threads: int
    io_threads: int
    has_tokenizer: bool
    trunk_codec: str
    expert_codec: str
    expert_activations: int = 0
    shared_per_token: int = 0

    @classmethod
    def from_c(cls, raw: _abi.hr_plan_result) -> Plan:
        return cls(**fields_from_c(cls, raw))

    def to_c(self) -> _abi.hr_plan_result:
        raw = _abi.hr_plan_result(size=ctypes.sizeof(_abi.hr_plan_result))
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(raw, name, value.encode() if isinstance(value, str) else value)
        return raw


def fields_from_c(cls: type, raw: ctypes.Structure) -> dict[str, Any]:
    """Those fields of the dataclass `cls` that a C struct has too."""
    values = {}
    for field in fields(cls):
        if not hasattr(raw, field.name):
            continue
        value = getattr(raw, field.name)
        if field.type == "bool":
            value = bool(value)
        values[field.name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return values


def plan(path: str | os.PathLike[str], **params: Any) -> Plan:
    """What the container at `path` needs; `params` are the keywords of :class:`headrace.Model`.

    Reads the manifest only. Raises HeadraceError when the container is not readable; a budget
    that is too small is an answer (`fits` is False), not an error.
    """
    lib = _abi.library()
    raw = _abi.hr_plan_result(size=ctypes.sizeof(_abi.hr_plan_result))
    error = _abi.hr_error()
    status = lib.hr_plan(path_bytes(path), ctypes.byref(model_params(lib, **params)),
                         ctypes.byref(raw), ctypes.byref(error))
    if status != _abi.HR_OK:
        raise from_status(status, error)
    return Plan.from_c(raw)


def plan_manifest(manifest: bytes, **params: Any) -> Plan:
    """The same for a container that does not exist yet, from the text of the manifest that it
    would have; checksums in it may be any numbers. `drives` need not exist either: they count."""
    lib = _abi.library()
    raw = _abi.hr_plan_result(size=ctypes.sizeof(_abi.hr_plan_result))
    error = _abi.hr_error()
    status = lib.hr_plan_manifest(manifest, len(manifest), ctypes.byref(model_params(lib, **params)),
                                  ctypes.byref(raw), ctypes.byref(error))
    if status != _abi.HR_OK:
        raise from_status(status, error)
    return Plan.from_c(raw)


def verify(path: str | os.PathLike[str],
           on_progress: Callable[[int, int], object] | None = None, *,
           drives: Iterable[str | os.PathLike[str]] = ()) -> list[str]:
    """Reads every byte of every file of a container and checks it.

    Args:
        path: the container directory.
        on_progress: called with (bytes done, bytes in all); returning False stops, and the
            faults found so far are returned.
        drives: as of :class:`headrace.Model`; every copy of every bank is checked.
    Returns:
        One text for each fault, naming file, layer, expert and offset (and the directory, of a
        drive's copy); empty when all is well.
    Raises:
        HeadraceError: the container could not be read at all. An exception raised in
            `on_progress` and Ctrl-C arrive here as they are.
    """
    lib = _abi.library()
    where = path_bytes(path)
    more = path_list(drives, "drives")
    others = (ctypes.c_char_p * len(more))(*more)
    faults: list[str] = []
    stopped: list[bool] = []

    def function(exchange):
        failures: list[BaseException] = []

        def report(_user, fault, text, done, total):
            try:
                if fault:
                    faults.append((text or b"").decode("utf-8", "replace"))
                    return 1 if stopped else 0
                more = exchange((done, total)) if on_progress is not None else True
                return 1 if stopped or more is not True else 0
            except BaseException as failure:
                failures.append(failure)
                return 1

        error = _abi.hr_error()
        status = lib.hr_verify_drives(where, others, len(others), _abi.hr_verify_fn(report), None,
                                      ctypes.byref(error))
        if failures:
            raise failures[0]
        if status != _abi.HR_OK and not faults and not stopped:
            raise from_status(status, error)
        if status not in (_abi.HR_OK, _abi.HR_ERR_FORMAT, _abi.HR_ERR_CANCELLED):
            raise from_status(status, error)

    def answer(event: tuple[int, int]) -> bool:
        assert on_progress is not None
        if on_progress(*event) is False:
            stopped.append(True)
            return False
        return True

    worker = Worker("headrace-verify")
    try:
        worker.call(function, cancel=lambda: stopped.append(True), answer=answer)
    finally:
        worker.finish(wait=False)
    return faults


