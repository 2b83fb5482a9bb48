"""Recorded routes: one JSON object a line, as `headrace trace` writes them.

A line has `layers`, a list of expert ids for each MoE layer; `tok` and other keys are ignored, but
for `phase`: tokens at the start with "prefill" were evaluated together. A first line may be an object
`headrace` that describes the container.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class TraceError(Exception):
    """A trace that cannot be used, and why."""


@dataclass(frozen=True)
class Trace:
    """routes: int32 [tokens, layers, top_k], -1 behind a shorter list. experts: of each layer, as far
    as known. record_bytes: of an expert, 0 when unknown. about: the description, or {}."""

    routes: NDArray[np.int32]
    experts: int
    record_bytes: int
    about: dict[str, object]

    @property
    def working_set(self) -> int:
        """Experts of a token: layers x top_k."""
        return self.routes.shape[1] * self.routes.shape[2]

    @property
    def total(self) -> int:
        return self.routes.shape[1] * self.experts


def _ids(value: object, where: str) -> list[list[int]]:
    if not isinstance(value, list) or not value:
        raise TraceError(f"{where}: 'layers' is no list of layers")
    for layer in value:
        if not isinstance(layer, list) or not layer or not all(type(e) is int for e in layer):
            raise TraceError(f"{where}: a layer is no list of expert ids")
        if min(layer) < 0 or max(layer) >= 1 << 16 or len(set(layer)) != len(layer):
            raise TraceError(f"{where}: expert ids are out of range, or one is there twice")
    return value


def _number(about: dict[str, object], key: str) -> int:
    value = about.get(key, 0)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise TraceError(f"line 1: {key!r} is no number")
    return value


def read_trace(path: Path) -> Trace:
    """Raises TraceError with the line, or OSError."""
    about: dict[str, object] = {}
    tokens: list[list[list[int]]] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{where}: is no JSON: {error}") from None
            if not isinstance(value, dict):
                raise TraceError(f"{where}: is no JSON object")
            if not tokens and not about and isinstance(value.get("headrace"), dict):
                about = value["headrace"]
                continue
            tokens.append(_ids(value.get("layers"), where))
            if len(tokens[-1]) != len(tokens[0]):
                raise TraceError(f"{where}: has {len(tokens[-1])} layers, the first {len(tokens[0])}")
    if not tokens:
        raise TraceError(f"{path}: there is no token in it")
    top_k = max(len(layer) for token in tokens for layer in token)
    routes = np.full((len(tokens), len(tokens[0]), top_k), -1, np.int32)
    for t, token in enumerate(tokens):
        for i, layer in enumerate(token):
            routes[t, i, : len(layer)] = layer
    experts = _number(about, "experts") or 1 << int(routes.max()).bit_length()
    if experts <= routes.max():
        raise TraceError(f"{path}: expert {routes.max()} of {experts}")
    return Trace(routes, experts, _number(about, "record_bytes"), about)
