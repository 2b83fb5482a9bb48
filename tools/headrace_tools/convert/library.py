"""The engine's library as an encoder, for the codecs that are encoded nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import EXIT_USAGE, ConvertError

if TYPE_CHECKING:
    from headrace.quant import Quantizer


def quantizer(codec: str, effort: str = "default", threads: int = 0) -> Quantizer:
    """threads 0: the physical cores. Raises ConvertError (usage) when the library is not there."""
    try:
        from headrace.quant import Quantizer

        return Quantizer(codec, effort=effort, threads=threads)
    except ImportError as error:
        raise ConvertError(f"{codec} is encoded by the engine: {error}", EXIT_USAGE) from None
