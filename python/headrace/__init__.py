"""Headrace runs Mixture-of-Experts language models far larger than RAM.

    import headrace

    with headrace.Model("path/to/container", ram="8GiB") as model:
        for token in model.stream("Once upon a time", temperature=0.8, seed=1):
            print(token.text, end="", flush=True)

The engine is a C library; this package calls it through ctypes. Errors are subclasses of
:class:`HeadraceError`.
"""

from ._abi import library as _library
from ._abi import use_library
from .advice import DiskRate, Forecast, Probe, forecast, probe
from .errors import (CancelledError, ContextError, FormatError, HeadraceError, HeadraceIOError,
                     HeadraceMemoryError, NumericError, UnsupportedError, UsageError)
from .generation import Generation, Stats, Token
from .model import Info, Model, Stream
from .plan import Plan, plan, plan_manifest, verify
from .simulate import Pace, Simulation, simulate


def version() -> str:
    """Version of the library in use, "major.minor.patch"."""
    return _library().hr_version().decode("ascii")


__all__ = [
    "CancelledError", "ContextError", "DiskRate", "Forecast", "FormatError", "Generation",
    "HeadraceError", "HeadraceIOError", "HeadraceMemoryError", "Info", "Model", "NumericError",
    "Pace", "Plan", "Probe", "Simulation", "Stats", "Stream", "Token", "UnsupportedError", "UsageError", "forecast",
    "plan", "plan_manifest", "probe", "simulate", "use_library", "verify", "version",
]
