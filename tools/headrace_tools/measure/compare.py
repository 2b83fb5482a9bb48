"""Two containers over one text: the same positions, predicted by both."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..convert.errors import EXIT_BAD_INPUT, EXIT_IO, EXIT_MEMORY, EXIT_USAGE
from .divergence import Estimate, Rows, compare_rows, estimates

if TYPE_CHECKING:
    import headrace

#: Tokens whose logits are held at once, for each container.
ROWS = 64
DEFAULT_WINDOW = 512


class MeasureError(Exception):
    """A comparison that cannot be made; `exit_code` is what the command ends with."""

    def __init__(self, message: str, exit_code: int = EXIT_BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def engine() -> ModuleType:
    """The `headrace` package with its library loaded. Raises MeasureError when one is missing."""
    try:
        import headrace

        headrace.version()
    except (ImportError, AttributeError, OSError) as error:
        raise MeasureError(f"the engine cannot be loaded: {error}", EXIT_IO) from error
    return headrace


@dataclass(frozen=True)
class Request:
    """What to compare.

    Attributes:
        ref, cand: container directories.
        text: file to score, or None; ids: file of token ids, or None. Exactly one is given.
        end: spelling of control tokens that follow the file.
        special: recognise control tokens spelled in the text.
        window: inputs from one fresh state. limit: windows to score, from the first on; None: all.
        ram: ceiling on both engines together, as at ``headrace.Model``. threads: 0 = all cores.
    """

    ref: Path
    cand: Path
    text: Path | None = None
    ids: Path | None = None
    end: str | None = None
    special: bool = True
    window: int = DEFAULT_WINDOW
    limit: int | None = None
    ram: int | str | None = None
    threads: int = 0


@dataclass(frozen=True)
class Side:
    """One of the two containers, as it predicted."""

    path: str
    container_sha256: str
    trunk_codec: str
    expert_codec: str
    mean_nll: float
    perplexity: float


@dataclass(frozen=True)
class Comparison:
    """The result.

    Attributes:
        kl: nats for each position. top1: share of positions with the same likeliest token.
        nll_difference: mean loss of the candidate minus the reference's; the logarithm of the
            ratio of their perplexities.
        rows: the figures of every position. targets: the id of the token each one predicts.
    """

    ref: Side
    cand: Side
    predictions: int
    windows: int
    window: int
    kl: Estimate
    top1: Estimate
    nll_difference: Estimate
    seconds: float
    rows: Rows
    targets: NDArray[np.int32]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the single positions."""
        whole = asdict(self)
        del whole["rows"], whole["targets"]
        return whole


def tokenizer_sha256(container: Path) -> str | None:
    """Hex SHA-256 of a container's tokenizer.bin; None for an ids-only container."""
    try:
        with open(container / "tokenizer.bin", "rb") as file:
            hashed = hashlib.sha256()
            while block := file.read(1 << 20):
                hashed.update(block)
            return hashed.hexdigest()
    except FileNotFoundError:
        return None


def check_tokenizers(request: Request) -> None:
    """Raises MeasureError unless ids mean the same to both containers, as far as can be known."""
    ref, cand = tokenizer_sha256(request.ref), tokenizer_sha256(request.cand)
    if ref is not None and cand is not None and ref != cand:
        raise MeasureError(
            f"{request.cand}: its tokenizer is not that of {request.ref} (SHA-256 of tokenizer.bin "
            f"{cand[:16]}… and {ref[:16]}…): their predictions cannot be compared"
        )
    if request.ids is None or request.end is not None:
        for path, found in ((request.ref, ref), (request.cand, cand)):
            if found is None:
                raise MeasureError(
                    f"{path}: has no tokenizer: give token ids with --ids FILE, without --end",
                    EXIT_USAGE,
                )


def parse_ids(data: bytes, name: str) -> NDArray[np.int32]:
    """Ids of a file: decimal numbers, separated by white space or commas."""
    words = data.replace(b",", b" ").split()
    for word in words:
        if re.fullmatch(rb"[0-9]{1,10}", word) is None or int(word) >= 2**31:
            shown = word[:20].decode("ascii", "replace")
            raise MeasureError(f"{name}: {shown!r} is not a token id (0 to 2147483647)")
    return np.array([int(word) for word in words], np.int32)


def read_ids(request: Request, model: headrace.Model) -> NDArray[np.int32]:
    """The ids to score, checked against the vocabulary; int32 [n], n >= 2."""
    source = request.ids if request.ids is not None else request.text
    assert source is not None
    data = source.read_bytes()
    if request.ids is not None:
        ids = parse_ids(data, str(source))
    else:
        ids = np.array(model.tokenize(data, special=request.special), np.int32)
    if request.end is not None:
        ids = np.append(ids, np.array(model.tokenize(request.end, special=True), np.int32))
    if ids.size < 2:
        raise MeasureError(f"{source}: {ids.size} token(s): scoring needs at least 2")
    vocabulary = model.info.vocab_size
    outside = np.flatnonzero(ids >= vocabulary)
    if outside.size:
        raise MeasureError(
            f"{source}: id {ids[outside[0]]} at index {outside[0]} is outside the vocabulary of "
            f"{vocabulary} tokens"
        )
    if request.limit is not None:
        ids = ids[: request.limit * request.window + 1]
    return ids


def ram_shares(request: Request) -> tuple[int, int]:
    """Bytes for each engine: their floors, and the rest by halves as far as each has use for it.

    Raises MeasureError when both floors together are more than there is.
    """
    plan = engine().plan
    plans = [
        plan(path, ctx=request.window, ram=request.ram, threads=request.threads)
        for path in (request.ref, request.cand)
    ]
    total, floors = plans[0].ram, [each.floor for each in plans]
    if sum(floors) > total:
        raise MeasureError(
            f"both containers together need at least {sum(floors)} bytes ({floors[0]} and "
            f"{floors[1]}), {total} are allowed: raise --ram",
            EXIT_MEMORY,
        )
    useful = [max(each.floor, each.recommended) for each in plans]
    spare = total - sum(floors)
    first = min(floors[0] + spare // 2, useful[0])
    second = min(total - first, useful[1])
    return min(total - second, useful[0]), second


def predictions(
    ref: headrace.Model,
    cand: headrace.Model,
    ids: NDArray[np.int32],
    window: int,
    progress: Callable[[int], object],
) -> Rows:
    """Figures of every position but the last id's; `progress` is told of new positions."""
    out = Rows.empty(ids.size - 1)
    for start in range(0, ids.size - 1, window):
        stop = min(start + window, ids.size - 1)
        for at in range(start, stop, ROWS):
            to = min(at + ROWS, stop)
            trusted = ref.logits(ids[at:to], keep=at > start)
            judged = cand.logits(ids[at:to], keep=at > start)
            try:
                part = compare_rows(trusted, judged, ids[at + 1 : to + 1])
            except ValueError as error:
                raise MeasureError(f"positions {at} to {to - 1}: {error}") from error
            out.put(at, part)
            progress(to - at)
    return out


def _side(path: Path, model: headrace.Model, nll: Estimate) -> Side:
    info = model.info
    return Side(
        str(path),
        info.container_sha256,
        info.trunk_codec,
        info.expert_codec,
        nll.mean,
        float(np.exp(nll.mean)),
    )


def compare(
    request: Request,
    progress: Callable[[int], object] = lambda count: None,
    started: Callable[[int], object] = lambda total: None,
) -> Comparison:
    """Runs both containers over the text once.

    Args:
        started: told the number of predictions once the text is tokenised.
        progress: told the number of new predictions now and then.
    Raises:
        MeasureError: tokenizers or vocabularies differ, a bad input file, too little memory.
        headrace.HeadraceError: what the engine raises. OSError: a file that cannot be read.
    """
    begun = time.monotonic()
    model = engine().Model
    shares = ram_shares(request)  # refuses a path that holds no container
    check_tokenizers(request)
    with ExitStack() as stack:
        ref, cand = (
            stack.enter_context(
                model(path, ram=share, ctx=request.window, threads=request.threads)
            )
            for path, share in zip((request.ref, request.cand), shares, strict=True)
        )
        sizes = ref.info.vocab_size, cand.info.vocab_size
        if sizes[0] != sizes[1]:
            raise MeasureError(
                f"{request.cand}: a vocabulary of {sizes[1]} tokens, {request.ref} has {sizes[0]}: "
                "their predictions cannot be compared"
            )
        ids = read_ids(request, ref)
        started(ids.size - 1)
        rows = predictions(ref, cand, ids, request.window, progress)
        kl, top1, nll_ref, nll_cand, difference = estimates(
            [
                rows.kl,
                rows.top1.astype(np.float64),
                rows.nll_ref,
                rows.nll_cand,
                rows.nll_cand - rows.nll_ref,
            ],
            request.window,
        )
        return Comparison(
            ref=_side(request.ref, ref, nll_ref),
            cand=_side(request.cand, cand, nll_cand),
            predictions=ids.size - 1,
            windows=-(-(ids.size - 1) // request.window),
            window=request.window,
            kl=kl,
            top1=top1,
            nll_difference=difference,
            seconds=round(time.monotonic() - begun, 2),
            rows=rows,
            targets=ids[1:],
        )
