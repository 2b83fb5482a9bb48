"""Containers that a checkpoint could become: memory and speed of each, from headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import headrace

from ..convert.native import native_codec_of_all
from ..convert.preflight import Preflight, make_bank
from ..convert.writer import manifest_to_be

SMALLER = "rvq4x64"
"""The codec that the lever of smaller experts stands for: --experts rvq3."""


@dataclass(frozen=True)
class Candidate:
    """One choice of --experts. bytes: of the container."""

    experts: str
    codec: str
    bytes: int
    plan: headrace.Plan
    pre: Preflight


def default_choices(pre: Preflight) -> list[str]:
    """A 4-bit source as it is, or int8; and what is smaller."""
    bank = pre.plan.banks[0] if pre.plan.banks else None
    native = bank is not None and native_codec_of_all(
        pre.checkpoint, [piece for e in range(bank.experts) for piece in bank.parts(e)])
    return ["auto", "rvq3"] if native else ["int8", "nl4", "rvq3"]


def candidates(pre: Preflight, choices: Iterable[str], **params: object) -> list[Candidate]:
    """The container of each choice, planned by the engine.

    params: keywords of ``headrace.plan``. Raises HeadraceError when the engine refuses the model.
    """
    found = []
    for choice in choices:
        other = replace(pre, options=replace(pre.options, experts=choice), notes=list(pre.notes))
        other.banks = [make_bank(other, bank.spec, choice) for bank in pre.banks]
        plan = headrace.plan_manifest(manifest_to_be(other), **params)
        found.append(Candidate(choice, plan.expert_codec, other.output_bytes(), plan, other))
    return found


def place_to_probe(pre: Preflight, target: Path, record_bytes: int) -> Path:
    """What shows the speed of the drive that the container will lie on: the largest file of the
    checkpoint when that is the same file system and large enough, else the directory itself."""
    directory = Path(os.path.abspath(target))
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    shards = [pre.source / shard.name for shard in pre.checkpoint.shards]
    largest = max((s for s in shards if s.is_file()), key=lambda s: s.stat().st_size, default=None)
    if (largest is not None and largest.stat().st_dev == directory.stat().st_dev
            and largest.stat().st_size >= 256 * record_bytes):
        return largest
    return directory


def measure(candidate: Candidate, place: Path, seconds: float,
            disk: headrace.Probe | None) -> headrace.Probe:
    """The machine with this candidate's shapes; the drive is taken from `disk` when given."""
    changes: dict[str, object] = {"other_codec": SMALLER} if smaller_record(candidate) else {}
    if disk is not None:
        found = headrace.probe(None, candidate.plan, **changes)
        drive = {name: getattr(disk, name) for name in (
            "disk", "best_depth", "asked", "physical", "accounted", "cold", "direct", "fresh",
            "rotational", "usb", "network", "memory", "filesystem", "device")}
        return replace(found, **drive)
    if not candidate.plan.moe_layers:
        return headrace.probe(None, candidate.plan, **changes)
    return headrace.probe(place, candidate.plan, disk_seconds=seconds, **changes)


def smaller_record(candidate: Candidate) -> int:
    """Bytes of an expert in SMALLER; 0 when it has none or is not larger."""
    if not candidate.pre.banks:
        return 0
    bank = make_bank(candidate.pre, candidate.pre.banks[0].spec, "rvq3")
    return bank.record_bytes if bank.record_bytes < candidate.plan.record_bytes else 0


def forecast(candidate: Candidate, probe: headrace.Probe,
             misses: list[float] | None) -> headrace.Forecast:
    return headrace.forecast(candidate.plan, probe, misses=misses,
                             other_record_bytes=smaller_record(candidate))
