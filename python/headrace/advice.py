"""Will a model run on this machine, and how fast: the drive and the processor measured, tokens per
second forecast, what limits them, what would help."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _abi
from ._params import path_bytes
from .errors import UsageError, from_status
from .plan import Plan, fields_from_c

LIMITS = ("disk", "memory", "compute")
VERDICTS = ("ready", "warn", "no")
LEVERS = ("ram", "faster_drive", "second_drive", "codec", "threads")
NO_LIMIT = 2**64 - 1


@dataclass(frozen=True, slots=True)
class DiskRate:
    """What a drive gives with `depth` reads in flight.

    Attributes:
        reads: how many it was measured with; 0: it was not.
        bytes_per_second, lowest, highest: on the whole, and of the slices of time.
        seconds_per_read: from asking to having.
    """

    depth: int
    reads: int
    bytes_per_second: float
    lowest: float
    highest: float
    seconds_per_read: float


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured. Rates are bytes a second of all threads together; 0: not measured.

    Attributes:
        disk: for ascending numbers of reads in flight; best_depth: the smallest within 5 % of the
            highest rate.
        cold: proven by the system's account of device reads; otherwise the figures may be those of
            memory. asked, physical: bytes; accounted: there is such an account.
        fresh: measured with a file written just now, which flatters some drives.
        rotational, usb, network, memory: what the system says of the drive.
        memory_rate: a plain read; expert_rate, other_rate, trunk_rate: products of one token.
        expert_activations: bits of those that expert_rate was measured with, as in Plan.
        dispatch_seconds: a parallel region with nothing in it.
        available, cgroup_room, memlock, swap_used: bytes; NO_LIMIT where there is no limit.
    """

    disk: tuple[DiskRate, ...]
    best_depth: int
    asked: int
    physical: int
    accounted: bool
    cold: bool
    direct: bool
    fresh: bool
    rotational: bool
    usb: bool
    network: bool
    memory: bool
    filesystem: str
    device: str
    memory_rate: float
    expert_rate: float
    other_rate: float
    trunk_rate: float
    dispatch_seconds: float
    threads: int
    physical_memory: int
    available: int
    cgroup_room: int
    memlock: int
    swap_used: int
    huge_pages: str
    expert_activations: int = 0

    @classmethod
    def from_c(cls, raw: _abi.hr_probe_result) -> Probe:
        rates = tuple(DiskRate(**fields_from_c(DiskRate, one)) for one in raw.disk[: raw.disk_rates])
        return cls(**(fields_from_c(cls, raw) | {"disk": rates}))

    def to_c(self) -> _abi.hr_probe_result:
        raw = _abi.hr_probe_result(size=ctypes.sizeof(_abi.hr_probe_result))
        raw.disk_rates = len(self.disk)
        for to, rate in zip(raw.disk, self.disk):
            for name in DiskRate.__slots__:
                setattr(to, name, getattr(rate, name))
        for name in self.__slots__:
            if name != "disk":
                value = getattr(self, name)
                setattr(raw, name, value.encode() if isinstance(value, str) else value)
        return raw


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens per second of decoding, and why.

    Attributes:
        tokens_per_second, low, high: an estimate and its band.
        hit_rate, hit_low, hit_high: share of expert requests that the cache answers.
        bytes_read: from disk, per token.
        seconds_disk, seconds_compute: per token, each as if it were alone.
        levers: name of LEVERS -> tokens per second with it, where it applies.
        limit: one of LIMITS; best_lever: one of LEVERS, None when none gains 5 %.
        verdict: one of VERDICTS; reasons: (grade, text), the gravest first, grade "no", "warn" or
            "note".
    """

    tokens_per_second: float
    low: float
    high: float
    hit_rate: float
    hit_low: float
    hit_high: float
    bytes_read: float
    seconds_disk: float
    seconds_compute: float
    levers: dict[str, float]
    limit: str
    best_lever: str | None
    verdict: str
    reasons: tuple[tuple[str, str], ...]

    @classmethod
    def from_c(cls, raw: _abi.hr_forecast_result) -> Forecast:
        grades = ("note", "warn", "no")
        return cls(**(fields_from_c(cls, raw) | {
            "levers": {name: rate for name, rate in zip(LEVERS, raw.lever) if rate > 0},
            "limit": LIMITS[raw.limit],
            "best_lever": LEVERS[raw.best_lever] if raw.best_lever >= 0 else None,
            "verdict": VERDICTS[raw.verdict],
            "reasons": tuple((grades[raw.grade[i]], raw.reason[i].value.decode("utf-8", "replace"))
                             for i in range(raw.reasons)),
        }))


def probe(path: str | os.PathLike[str] | None, plan: Plan | None = None, **changes: Any) -> Probe:
    """Measures the drive under `path` and, given a plan, what all threads compute.

    Args:
        path: a container (its experts are read), a file (itself), or a directory (a scratch file is
            written, read and gone); None: the drive is not measured.
        plan: shapes, codecs and threads to measure with.
        changes: fields of ``hr_probe_params``: disk_seconds, compute_seconds, record_bytes, ...
    Raises:
        HeadraceError: the path cannot be read, or an argument is out of range.
    """
    lib = _abi.library()
    params = _abi.hr_probe_params()
    given = plan.to_c() if plan is not None else None
    lib.hr_probe_params_init(ctypes.byref(params), ctypes.byref(given) if given is not None else None)
    if plan is None:
        params.compute_seconds = -1
    if path is None:
        params.disk_seconds = -1
    known = {name for name, _ in _abi.hr_probe_params._fields_} - {"size", "reserved"}
    for name, value in changes.items():
        if name not in known:
            raise UsageError(f"probe has no argument {name!r}")
        setattr(params, name, value.encode() if isinstance(value, str) else value)
    raw = _abi.hr_probe_result(size=ctypes.sizeof(_abi.hr_probe_result))
    error = _abi.hr_error()
    status = lib.hr_probe(None if path is None else path_bytes(path), ctypes.byref(params),
                          ctypes.byref(raw), ctypes.byref(error))
    if status != _abi.HR_OK:
        raise from_status(status, error)
    return Probe.from_c(raw)


def forecast(plan: Plan, probe: Probe, *, hit_rate: float | None = None,
             misses: Sequence[float] | None = None, position: int = 0,
             other_record_bytes: int = 0) -> Forecast:
    """Tokens per second from numbers alone; nothing is read.

    Args:
        hit_rate: share of expert requests that the cache answers; None: by a table of measured
            models. misses: instead, the shares of layers that miss 0, 1, ... experts.
        position: tokens of context; 0: 512.
        other_record_bytes: an expert in the probe's other codec.
    Raises:
        HeadraceError: the probe lacks what it needs.
    """
    lib = _abi.library()
    params = _abi.hr_forecast_params()
    lib.hr_forecast_params_init(ctypes.byref(params))
    raw_plan, raw_probe = plan.to_c(), probe.to_c()
    params.plan, params.probe = ctypes.pointer(raw_plan), ctypes.pointer(raw_probe)
    if hit_rate is not None:
        params.hit_rate = hit_rate
    if misses is not None:
        shares = (ctypes.c_double * len(misses))(*misses)
        params.misses, params.miss_count = shares, len(misses)
    params.position = position
    params.other_record_bytes = other_record_bytes
    raw = _abi.hr_forecast_result(size=ctypes.sizeof(_abi.hr_forecast_result))
    error = _abi.hr_error()
    status = lib.hr_forecast(ctypes.byref(params), ctypes.byref(raw), ctypes.byref(error))
    if status != _abi.HR_OK:
        raise from_status(status, error)
    return Forecast.from_c(raw)
