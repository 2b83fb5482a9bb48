"""The C interface of one model behind a small Python class."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


class Engine:
    """A model opened through cffi; every failing call raises with the detail."""

    def __init__(self, lib, path: Path, **params) -> None:
        self.ffi, self.c = lib
        self.err = self.ffi.new("hr_error *")
        wanted = self.ffi.new("hr_model_params *")
        self.c.hr_model_params_init(wanted)
        for name, value in {"ctx": 64, "threads": 2, "max_sessions": 2, **params}.items():
            setattr(wanted, name, value)
        out = self.ffi.new("hr_model **")
        self.check(self.c.hr_model_open(os.fsencode(path), wanted, out, self.err))
        self.model = out[0]
        info = self.ffi.new("hr_model_info *")
        info.size = self.ffi.sizeof("hr_model_info")
        self.check(self.c.hr_model_get_info(self.model, info, self.err))
        self.vocab = info.vocab_size

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(status, self.ffi.string(self.err.detail).decode())

    def session(self):
        out = self.ffi.new("hr_session **")
        self.check(self.c.hr_session_create(self.model, out, self.err))
        return out[0]

    def eval(self, session, ids: list[int]) -> bytes:
        """Logits of the last id, as bytes: equality is equality of bits."""
        logits = np.empty(self.vocab, np.float32)
        self.check(self.c.hr_eval(session, ids, len(ids), 1,
                                  self.ffi.cast("float *", logits.ctypes.data), self.err))
        return logits.tobytes()

    def save(self, session, path: Path) -> None:
        self.check(self.c.hr_session_save(session, os.fsencode(path), self.err))

    def load(self, session, path: Path) -> None:
        self.check(self.c.hr_session_load(session, os.fsencode(path), self.err))

    def leases(self) -> int:
        stats = self.ffi.new("hr_stats *")
        stats.size = self.ffi.sizeof("hr_stats")
        self.check(self.c.hr_get_stats(self.model, stats, self.err))
        return stats.leases
