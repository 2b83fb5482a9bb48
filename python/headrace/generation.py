"""What a generation hands out: tokens, the finished text, statistics."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from . import _abi

FINISH_REASONS = {
    _abi.HR_FINISH_STOP: "stop",
    _abi.HR_FINISH_LENGTH: "length",
    _abi.HR_FINISH_CONTEXT: "context",
    _abi.HR_FINISH_CANCELLED: "cancelled",
    _abi.HR_FINISH_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of one generation, or of a model since it was opened.

    Bytes are bytes, times are seconds; the meaning of each field stands at ``hr_stats`` in
    ``headrace.h``.
    """

    tokens_prefilled: int
    tokens_decoded: int
    hits: int
    misses: int
    reads: int
    bytes_read: int
    trunk_bytes_read: int
    read_retries: int
    records_verified: int
    evictions: int
    transient_reads: int
    leases: int
    cache_slots: int
    cache_used: int
    cache_bytes: int
    memory_used: int
    memory_peak: int
    memory_limit: int
    seconds_prefill: float
    seconds_decode: float
    seconds_waiting: float
    seconds_compute: float
    seconds_other: float
    read_fallbacks: int
    read_ahead_issued: int
    read_ahead_used: int
    read_ahead_wasted: int
    read_ahead_cancelled: int
    read_ahead_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of expert requests that the cache answered, 0 when there were none."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0

    @classmethod
    def from_c(cls, raw: _abi.hr_stats) -> Stats:
        return cls(*[getattr(raw, name) for name in cls.__slots__])


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: its number in the vocabulary; -1 for a last event that has no token and only carries
            text which was held back because it might have begun a stop string or a character.
        index: 0 for the first generated token.
        bytes: its raw bytes, which need not be valid UTF-8 (a control token: its spelling).
        text: the text that became complete with it; may be empty.
        logprob: natural logarithm of its probability at temperature 1.
        stats: running totals of this generation.
    """

    id: int
    index: int
    bytes: bytes
    text: str
    logprob: float
    stats: Stats

    @classmethod
    def from_c(cls, raw: _abi.hr_token) -> Token:
        return cls(
            id=raw.id,
            index=raw.index,
            bytes=ctypes.string_at(raw.bytes, raw.bytes_len) if raw.bytes_len else b"",
            text=ctypes.string_at(raw.text, raw.text_len).decode("utf-8") if raw.text_len else "",
            logprob=raw.logprob,
            stats=Stats.from_c(raw.stats.contents),
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation.

    Attributes:
        text: the generated text, prompt not included; ill-formed bytes became U+FFFD.
        ids: the generated ids, a stop id not included.
        finish_reason: "stop", "length", "context" or "cancelled".
        stats: totals of this generation.
        stop_id: the id that stopped it, or None.
        stop_string: the stop string that stopped it, or None.
    """

    text: str
    ids: list[int]
    finish_reason: str
    stats: Stats
    stop_id: int | None = None
    stop_string: str | None = None

    def __str__(self) -> str:
        return self.text
