"""The C tokenizer behind a small Python class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 1 << 20


class CoreError(Exception):
    """A call of the engine failed; `status` is the hr_status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class CoreTokenizer:
    """An opened tokenizer.bin."""

    def __init__(self, lib: tuple[Any, Any], data: bytes, vocab_size: int = VOCAB,
                 limit: int = 0) -> None:
        self.ffi, self.core = lib
        self.data = self.ffi.new("char[]", data)  # a copy: the engine keeps pointing into it
        self.budget = self.ffi.new("struct mem_budget *")
        self.core.mem_budget_init(self.budget, limit)
        self.error = self.ffi.new("hr_error *")
        handle = self.ffi.new("struct tokenizer **")
        self._raise(self.core.tokenizer_open(self.data, len(data), vocab_size, self.budget, handle,
                                             self.error))
        self.handle = handle[0]
        self.opened = self.budget.used

    def close(self) -> None:
        assert self.budget.used == self.opened, "an encode kept memory"
        self.core.tokenizer_free(self.handle)
        assert self.budget.used == 0

    def __enter__(self) -> CoreTokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise(self, status: int) -> None:
        if status != self.core.HR_OK:
            assert self.error.code == status
            raise CoreError(status, self.ffi.string(self.error.detail).decode())

    def encode_into(self, text: bytes, special: bool, capacity: int) -> tuple[int, int, list[int]]:
        """(status, count, the whole id buffer of `capacity`, -7 where nothing was written)."""
        ids = self.ffi.new("int32_t[]", [-7] * capacity)
        count = self.ffi.new("size_t *")
        status = self.core.tokenizer_encode(self.handle, text, len(text), special, ids, capacity,
                                            count, self.error)
        return status, count[0], list(ids)

    def encode(self, text: str | bytes, special: bool = False) -> list[int]:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        status, count, ids = self.encode_into(raw, special, 3 * len(raw))
        self._raise(status)
        return ids[:count]

    def token(self, number: int) -> bytes:
        length = self.ffi.new("size_t *")
        start = self.core.tokenizer_bytes(self.handle, number, length)
        return self.ffi.buffer(start, length[0])[:]

    def decode(self, ids: list[int]) -> bytes:
        return b"".join(map(self.token, ids))


def without_added_tokens(path: Path) -> str:
    """The tokenizer.json with every added token taken out: what plain text must encode to."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    spec["added_tokens"] = []
    return json.dumps(spec)
