"""Errors of the conversion tools and their exit codes."""

from __future__ import annotations

EXIT_USAGE = 2
EXIT_BAD_INPUT = 3
EXIT_MEMORY = 4
EXIT_IO = 5


class ConvertError(Exception):
    """A conversion that cannot go on: the message names file, tensor and remedy.

    `exit_code` is what the command ends with; `faults` holds the single findings
    when there are several.
    """

    def __init__(
        self, message: str, exit_code: int = EXIT_BAD_INPUT, faults: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.faults = faults


def as_fault(error: ConvertError) -> str:
    """Its text, for a list of findings about the input. What the disk did is none: raised again."""
    if error.exit_code == EXIT_IO:
        raise error
    return str(error)
