"""--budget: one codec for every MoE layer's bank, by measured output error within a size."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from . import codebooks, paths
from .calibration import MAX_TOKENS, LayerErrors, capture, check_reference, layer_errors, read_text
from .errors import EXIT_USAGE, ConvertError
from .feedback import Feedback
from .knapsack import choose
from .options import EXPERT_CHOICES, RVQ_CODECS, Allocation
from .output import LOG
from .preflight import Bank, Preflight, candidate_banks, make_bank, part_of
from .writer import CONVERTER, container_bytes

KNOWN = tuple(codec for codec in EXPERT_CHOICES if codec != "auto")
CANDIDATES = tuple(codec for codec in KNOWN if codec not in ("f32", "rvq3x256"))
"""f32 is what bf16 becomes where it must, and rvq3x256 has the size of rvq3 and is slower."""
MAX_BUDGET = 1 << 62
_BANK_TEXT, _NOTE_TEXT = 24, 256
"""How much longer a manifest can get by another codec of a bank, and by a note about a codec."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What --budget asks for: bytes of the whole container, a text, a container, the codecs."""

    budget: int
    text: Path
    reference: Path
    candidates: tuple[str, ...] = CANDIDATES


def parse_size(text: str) -> int:
    """Bytes of "18GiB", "18.5 GB" or "12345". Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?\s*([A-Za-z]*)", text.strip())
    if match is None or (unit := _UNITS.get(match[3].upper())) is None:
        raise ValueError(f"{text!r} is no size such as 18GiB")
    fraction = match[2] or ""
    count = int(match[1] + fraction) * unit // 10 ** len(fraction)
    if count > MAX_BUDGET:
        raise ValueError(f"{text!r} is more than any file system holds")
    return count


def parse_candidates(text: str) -> tuple[str, ...]:
    """Codecs separated by commas. Raises ValueError."""
    found = tuple(dict.fromkeys(text.split(",")))
    for codec in found:
        if codec not in KNOWN:
            raise ValueError(f"{codec!r} is none of {', '.join(KNOWN)}")
    return found


def _books(bank: Bank) -> int:
    return codebooks.file_bytes([bank.codec])


def _bytes(bank: Bank) -> int:
    """What a bank adds to the container."""
    return bank.nbytes + _books(bank)


def _with_banks(pre: Preflight, banks: list[Bank], allocation: Allocation) -> Preflight:
    return replace(pre, banks=banks, options=replace(pre.options, allocation=allocation))


def _table(
    banks: list[list[Bank]], measured: list[LayerErrors]
) -> list[dict[str, object]]:
    """Rounded, so that the last digits of another machine's arithmetic change nothing."""
    return [
        {
            "layer": row[0].spec.layer,
            "output": _rounded(one.output),
            "errors": {b.codec: _rounded(e) for b, e in zip(row, one.errors, strict=True)},
        }
        for row, one in zip(banks, measured, strict=True)
    ]


def _check_finite(table: list[dict[str, object]]) -> None:
    for row in table:
        if not all(math.isfinite(v) and v >= 0 for v in (*row["errors"].values(), row["output"])):  # type: ignore[attr-defined]
            raise ConvertError(
                f"layer {row['layer']}: what its experts write on the calibration text is not finite"
            )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _remembered(
    target: Path | None, pre: Preflight, wanted: Allocation, banks: list[list[Bank]]
) -> list[dict[str, object]] | None:
    """The table an earlier run left in `target` for the same question; None: it must be measured."""
    if target is None:
        return None
    try:
        if paths.exists(target / LOG):
            old = json.loads(paths.read_bytes(target / LOG).split(b"\n")[0])
            options, source, converter = old["options"], old["source"], old["converter"]
        else:
            old = json.loads(paths.read_bytes(target / "manifest.json"))["provenance"]
            options = {**old["options"], "allocation": old["allocation"]}
            source, converter = None, old["converter"]
            shards = [{k: s[k] for k in ("name", "bytes", "header_sha256")} for s in old["shards"]]
            if shards != pre.identity["shards"]:
                return None
        found = options.pop("allocation")
        table = found["table"]
        same = (
            [options["effort"], options.get("feedback"), found["calibration"], found["reference"]]
            == [pre.options.effort, pre.options.feedback, wanted.calibration, wanted.reference]
        )
        fits = [(row["layer"], sorted(row["errors"])) for row in table] == [
            (row[0].spec.layer, sorted(b.codec for b in row)) for row in banks
        ]
        _check_finite(table)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConvertError):
        return None
    if converter != CONVERTER or (source is not None and source != pre.identity):
        return None
    return table if same and fits else None


def allocate(
    pre: Preflight,
    request: Request,
    target: Path | None = None,
    progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> Preflight:
    """`pre` with the chosen codecs. Raises ConvertError, also when the budget is too small.

    `target`: where an unfinished or finished conversion of the same question may have left its
    measurements. `progress` is told what is done, and how much of how much.
    """
    if not pre.banks:
        raise ConvertError(f"{pre.source}: has no routed experts to spend a budget on", EXIT_USAGE)
    reference = check_reference(request.reference, pre)
    text = read_text(request.text)
    banks = [candidate_banks(pre, bank.spec, request.candidates) for bank in pre.banks]
    question = Allocation(request.budget, hashlib.sha256(text).hexdigest(), reference)
    empty = [{"layer": row[0].spec.layer, "output": 1.23456e-100,
              "errors": {b.codec: 1.23456e-100 for b in row}} for row in banks]
    least = [min(row, key=_bytes) for row in banks]
    longest = max((b.codec for row in banks for b in row), key=len)
    widest = replace(
        question, budget=MAX_BUDGET, codecs=(longest,) * len(banks), table=tuple(empty)
    )
    fixed = max(
        container_bytes(_with_banks(pre, some, widest)) - sum(map(_bytes, some))
        for some in (least, [max(row, key=_books) for row in banks])
    )
    fixed += _BANK_TEXT * len(banks) + _NOTE_TEXT * len(request.candidates)
    smallest = fixed + sum(map(_bytes, least))
    if smallest > request.budget:
        used = ", ".join(sorted({b.codec for b in least}))
        raise ConvertError(
            f"{pre.source}: the budget of {request.budget} bytes is below the smallest possible "
            f"container, {smallest} bytes ({used} experts, {pre.options.trunk} trunk)",
            EXIT_USAGE,
        )
    table = _remembered(target, pre, question, banks)
    if table is None:
        samples = capture(
            request.reference,
            text,
            pre,
            lambda done, total: progress("tokens", done, total),
            None if pre.options.feedback is None else MAX_TOKENS,
        )
        if pre.options.feedback is not None:
            pre = replace(pre, feedback=Feedback(samples))
        measured = []
        for row in banks:
            spec = row[0].spec
            ffn = part_of(pre, spec.layer)
            measured.append(layer_errors(pre, row, samples[spec.layer], ffn))
            progress("layers", len(measured), len(banks))
        table = _table(banks, measured)
        _check_finite(table)
    # Plain squares: what one layer adds to the residual stream weighs as much as another's.
    costs = [[float(row["errors"][b.codec]) for b in layer]  # type: ignore[index]
             for row, layer in zip(table, banks, strict=True)]
    picks = choose([[_bytes(b) for b in row] for row in banks], costs, request.budget - fixed)
    assert picks is not None
    chosen = [
        make_bank(pre, row[i].spec, row[i].codec) for row, i in zip(banks, picks, strict=True)
    ]
    allocation = replace(question, codecs=tuple(b.codec for b in chosen), table=tuple(table))
    return _with_banks(pre, chosen, allocation)


def table_text(allocation: Allocation) -> list[str]:
    """Lines for people: every layer's choice, and the relative output error of each candidate."""
    if not allocation.table:
        return []
    codecs = list(allocation.table[0]["errors"])  # type: ignore[call-overload]
    lines = [f"budget      {allocation.budget:,} bytes; relative squared output error of a layer:",
             "            layer  " + "".join(f"{codec:>10}" for codec in codecs) + "  chosen"]
    for row, chosen in zip(allocation.table, allocation.codecs, strict=True):
        output = float(row["output"])  # type: ignore[arg-type]
        shares = [float(row["errors"][c]) / output if output else 0.0 for c in codecs]  # type: ignore[index]
        lines.append(f"            {row['layer']:>5}  "
                     + "".join(f"{share:>10.3g}" for share in shares) + f"  {chosen}")
    return lines
