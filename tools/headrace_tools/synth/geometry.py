"""From a config.json to the layout of a container, without a checkpoint.

The families' mapping decides parts, tensors and shapes exactly as it does in a conversion; every
tensor it asks for is taken to exist, as BF16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..convert import families
from ..convert.errors import ConvertError
from ..convert.options import Options
from ..convert.preflight import Preflight, faults_error, lay_out
from ..convert.safetensors_source import Shard, TensorEntry

_MANY = 1 << 24


class _Assumed(Mapping[str, TensorEntry]):
    """Names nothing (so families keep their default spelling) but is large enough for any config."""

    def __getitem__(self, name: str) -> TensorEntry:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return _MANY


@dataclass
class _NoCheckpoint:
    """What a layout asks of a checkpoint."""

    tensors: Mapping[str, TensorEntry] = field(default_factory=_Assumed)
    shards: list[Shard] = field(default_factory=list)


def layout(config: Mapping[str, object], name: str, options: Options) -> Preflight:
    """Files, tensors and manifest of a config. Raises ConvertError with all faults of the config."""
    checkpoint = _NoCheckpoint()
    family = families.detect(config, name)
    plan = family.plan(config, checkpoint.tensors)
    if plan.faults or plan.tensor_faults:
        raise faults_error(Path(name), [*plan.faults, *plan.tensor_faults])
    if plan.ngram is not None:
        raise ConvertError(f"{name}: n-gram rows and their hash numbers are not synthesised")
    pre = Preflight(Path(name), name, options, checkpoint, plan, {})  # type: ignore[arg-type]
    lay_out(pre)
    pre.raise_faults()
    return pre
