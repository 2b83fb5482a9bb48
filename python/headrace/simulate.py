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
    """

    tokens: int
    hits: int
    misses: int
    evictions: int
    transient_reads: int
    layer_misses: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        requests = self.hits + self.misses
        return self.hits / requests if requests else 0.0

    @property
    def miss_shares(self) -> list[float]:
        """Of the layers: what ``headrace.forecast`` takes as `misses`."""
        layers = sum(self.layer_misses)
        return [n / layers for n in self.layer_misses] if layers else []


def simulate(routes: NDArray[np.int32], slots: int, *, experts: int, policy: str = "auto",
             prefill: int = 0, chunk: int = 0, warm_up: int = 0) -> Simulation:
    """Runs the cache of the engine over routes.

    Args:
        routes: expert ids int32 [tokens, layers, top_k], -1 behind a shorter list.
        slots: experts that the cache holds; experts: of each layer.
        policy: "auto", "lru" or "lfu", as for ``Model``.
        prefill: tokens at the start that are evaluated in chunks of `chunk` (0: 512).
        warm_up: tokens at the start whose requests are not counted.
    Raises:
        HeadraceError: an id or a number is out of range.
    """
    array = np.ascontiguousarray(routes, dtype=np.int32)
    if array.ndim != 3:
        raise UsageError(f"routes have {array.ndim} dimensions, not tokens, layers, top_k")
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
    misses = (ctypes.c_uint64 * (params.top_k + 1))()
    raw = _abi.hr_simulate_result(size=ctypes.sizeof(_abi.hr_simulate_result))
    error = _abi.hr_error()
    status = lib.hr_simulate(ctypes.byref(params), ids_pointer(array), tokens, misses,
                             ctypes.byref(raw), ctypes.byref(error))
    if status != _abi.HR_OK:
        raise from_status(status, error)
    return Simulation(raw.tokens, raw.hits, raw.misses, raw.evictions, raw.transient_reads,
                      tuple(misses))
