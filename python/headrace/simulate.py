"""The engine's cache of experts on recorded routes: what would have been hits, without reading."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import _abi
from ._params import CACHE_POLICY, choice, ids_pointer, whole
from .errors import UsageError, from_status


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a cache did, of the tokens after the warm-up.

    Attributes:
        tokens: counted; hits, misses: requests of theirs.
        layer_misses: how many layers of single tokens missed 0, 1, ... experts.
        ahead_issued, ahead_used, ahead_wasted, ahead_cancelled: experts read ahead: begun; asked for
            later, which counts as a miss; read in vain; taken back before they began.
        alone: counted tokens evaluated one by one; the seconds are theirs, by `Pace`.
        seconds: in all; seconds_blocked: of these, waiting for the drive.
        seconds_wanted: of reading what they missed, read ahead or not.
    """

    tokens: int
    hits: int
    misses: int
    evictions: int
    transient_reads: int
    layer_misses: tuple[int, ...]
    ahead_issued: int = 0
    ahead_used: int = 0
    ahead_wasted: int = 0
    ahead_cancelled: int = 0
    alone: int = 0
    seconds: float = 0.0
    seconds_blocked: float = 0.0
    seconds_wanted: float = 0.0

    @property
    def hit_rate(self) -> float:
        requests = self.hits + self.misses
        return self.hits / requests if requests else 0.0

    @property
    def miss_shares(self) -> list[float]:
        """Of the layers: what ``headrace.forecast`` takes as `misses`."""
        layers = sum(self.layer_misses)
        return [n / layers for n in self.layer_misses] if layers else []


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, for a simulation that counts seconds.

    A layer takes `layer`, then its experts: what is there computes while the others are read, and the
    last to land computes alone. The drive gives one record every `read`, in the order asked for; what is
    read ahead stands behind what is waited for, and is taken back when it is not wanted and is not yet
    among the `in_flight` reads that the drive works on.

    Attributes:
        read: seconds of an expert's record while there are others to read.
        layer: arithmetic of a layer but for its experts; expert: of one expert.
        in_flight: 0: 4.
    """

    read: float
    layer: float = 0.0
    expert: float = 0.0
    in_flight: int = 0


def _int32(array: NDArray[np.int32], name: str) -> NDArray[np.int32]:
    given = np.asarray(array)
    if given.ndim != 3:
        raise UsageError(f"{name} have {given.ndim} dimensions, not tokens, layers, ranks")
    if given.dtype.kind not in "iu":
        raise TypeError(f"{name} are {given.dtype}, not integers")
    array = np.ascontiguousarray(given, dtype=np.int32)
    if given.dtype != np.int32 and not np.array_equal(array, given):
        raise UsageError(f"{name}: an id is out of range")
    return array


def simulate(routes: NDArray[np.int32], slots: int, *, experts: int, policy: str = "auto",
             prefill: int = 0, chunk: int = 0, warm_up: int = 0,
             guesses: NDArray[np.int32] | None = None, read_ahead: int = 0,
             pace: Pace | None = None) -> Simulation:
    """Runs the cache of the engine over routes.

    Args:
        routes: expert ids int32 [tokens, layers, top_k], -1 behind a shorter list.
        slots: experts that the cache holds; experts: of each layer.
        policy: "auto", "lru" or "lfu", as for ``Model``.
        prefill: tokens at the start that are evaluated in chunks of `chunk` (0: 512).
        warm_up: tokens at the start whose requests are not counted.
        guesses: int32 [tokens, layers, ranks]: what the layer before would have read for each layer, the
            best first, -1 behind a shorter list; those of the first layer are not looked at.
        read_ahead: how many of the ranks are read, as for ``Model``.
        pace: counts seconds; without it whatever was begun is there at once.
    Raises:
        HeadraceError: an id or a number is out of range.
    """
    array = _int32(routes, "routes")
    lib = _abi.library()
    params = _abi.hr_simulate_params()
    lib.hr_simulate_params_init(ctypes.byref(params))
    tokens, params.layers, params.top_k = array.shape
    most = 2**32 - 1
    params.experts = whole(experts, "experts", 1, most)
    params.slots = whole(slots, "slots", 0, most)
    params.policy = choice(policy, "policy", CACHE_POLICY)
    params.prefill = whole(prefill, "prefill", 0, most)
    params.chunk = whole(chunk, "chunk", 0, most)
    params.warm_up = whole(warm_up, "warm_up", 0, most)
    params.read_ahead = whole(read_ahead, "read_ahead", 0, most)
    if guesses is not None:
        guesses = _int32(guesses, "guesses")
        if guesses.shape[:2] != array.shape[:2]:
            raise UsageError(f"guesses are {guesses.shape}, routes {array.shape}: tokens and layers differ")
        params.guesses, params.guess_ranks = ids_pointer(guesses), guesses.shape[2]
    if pace is not None:
        params.read_seconds, params.layer_seconds = pace.read, pace.layer
        params.expert_seconds = pace.expert
        params.in_flight = whole(pace.in_flight, "in_flight", 0, most)
    misses = (ctypes.c_uint64 * (params.top_k + 1))()
    raw = _abi.hr_simulate_result(size=ctypes.sizeof(_abi.hr_simulate_result))
    error = _abi.hr_error()
    status = lib.hr_simulate(ctypes.byref(params), ids_pointer(array), tokens, misses,
                             ctypes.byref(raw), ctypes.byref(error))
    if status != _abi.HR_OK:
        raise from_status(status, error)
    return Simulation(raw.tokens, raw.hits, raw.misses, raw.evictions, raw.transient_reads,
                      tuple(misses), raw.read_ahead_issued, raw.read_ahead_used, raw.read_ahead_wasted,
                      raw.read_ahead_cancelled, raw.alone, raw.seconds, raw.seconds_blocked,
                      raw.seconds_wanted)
