"""Run-time checkers and what tests can expect under them."""

from __future__ import annotations

from pathlib import Path


def sanitized() -> bool:
    """Whether a run-time checker is loaded: it keeps freed memory and reserves address space."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    return any(name in text for name in ("libasan", "libtsan", "libclang_rt"))
