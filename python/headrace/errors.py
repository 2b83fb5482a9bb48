"""Exceptions. Every failure of the engine is a :class:`HeadraceError`.

Values that make no sense (a negative temperature, an id outside the vocabulary, a second call on
a model from inside its own callback) raise :class:`UsageError`, which is also a ValueError; a
wrong type raises TypeError as usual.
"""

from __future__ import annotations

from . import _abi


class HeadraceError(Exception):
    """A call failed.

    Attributes:
        code: the ``hr_status`` number of ``headrace.h``.
        detail: what went wrong, where (file, tensor, layer, offset) and what to do.
    """

    code: int = _abi.HR_OK

    def __init__(self, detail: str, code: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        if code is not None:
            self.code = code

    def __reduce__(self):
        return type(self), (self.detail, self.code)


class UsageError(HeadraceError, ValueError):
    """An argument is out of range, or the call is not allowed now."""

    code = _abi.HR_ERR_USAGE


class FormatError(HeadraceError):
    """A file is not what it should be, or is damaged."""

    code = _abi.HR_ERR_FORMAT


class HeadraceMemoryError(HeadraceError, MemoryError):
    """The ram budget or the system cannot hold it; the detail names the floor in bytes."""

    code = _abi.HR_ERR_MEMORY


class HeadraceIOError(HeadraceError):
    """The operating system refused or failed a file operation."""

    code = _abi.HR_ERR_IO


class ContextError(HeadraceError, ValueError):
    """More tokens than the context holds; nothing was evaluated."""

    code = _abi.HR_ERR_CONTEXT


class CancelledError(HeadraceError):
    """The evaluation was stopped before it was complete."""

    code = _abi.HR_ERR_CANCELLED


class NumericError(HeadraceError):
    """A NaN or infinity appeared in a layer's output."""

    code = _abi.HR_ERR_NUMERIC


class UnsupportedError(HeadraceError):
    """A valid container that needs something this build, or this container, lacks."""

    code = _abi.HR_ERR_UNSUPPORTED


_BY_CODE: dict[int, type[HeadraceError]] = {
    kind.code: kind
    for kind in (UsageError, FormatError, HeadraceMemoryError, HeadraceIOError, ContextError,
                 CancelledError, NumericError, UnsupportedError)
}


def from_status(status: int, error: _abi.hr_error) -> HeadraceError:
    """The exception for a status that is not HR_OK."""
    detail = error.detail.decode("utf-8", "replace") or f"status {status}"
    return _BY_CODE.get(status, HeadraceError)(detail, status)


def check(status: int, error: _abi.hr_error) -> None:
    """Raises the exception for `status` unless it is HR_OK."""
    if status != _abi.HR_OK:
        raise from_status(status, error)
