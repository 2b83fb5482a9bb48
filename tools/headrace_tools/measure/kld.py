"""headrace-kld REF CAND --text FILE: what the candidate's codec costs, in nats."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..convert.errors import EXIT_BAD_INPUT, EXIT_IO, EXIT_MEMORY, EXIT_USAGE
from .compare import DEFAULT_WINDOW, Comparison, MeasureError, Request, compare, engine
from .divergence import Estimate

_EPILOG = """REF is the trusted container (bf16, say), CAND the one in question. FILE is tokenised
whole and cut in windows of N inputs; every window starts from a fresh state and every position is
scored, as `headrace score` does. KL is KL(REF || CAND), the mean over positions; intervals are
95 %, a block bootstrap over windows. Both containers are open at once and share --ram. Beside it
the comparison takes memory for 64 rows of logits of each and about 100 bytes for each token of the
text.

exit codes: 0 ok, 2 usage, 3 bad input file or tokenizers that differ, 4 not enough memory,
5 input/output, 130 interrupted."""


def check_writable(path: Path) -> None:
    """Raises MeasureError when `path` could not be written after the work is done."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise MeasureError(f"{path}: cannot be written", EXIT_IO)


def write_positions(path: Path, result: Comparison) -> None:
    """Writes one row of figures for each position; the file appears whole or not at all.

    Arrays, all of length `predictions`: ``target`` int32 (the id predicted), ``window`` int32,
    ``position`` int32 (within the window), ``kl``, ``nll_ref``, ``nll_cand`` float64 in nats,
    ``top1`` bool.
    """
    index = np.arange(result.predictions, dtype=np.int64)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(
                file,
                target=result.targets,
                window=(index // result.window).astype(np.int32),
                position=(index % result.window).astype(np.int32),
                kl=result.rows.kl,
                nll_ref=result.rows.nll_ref,
                nll_cand=result.rows.nll_cand,
                top1=result.rows.top1,
            )
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def interval(estimate: Estimate, digits: int, scale: float = 1.0) -> str:
    """ "[low, high]", or a word on why there is none."""
    if estimate.low is None or estimate.high is None:
        return "(one window: no interval)"
    return f"[{estimate.low * scale:.{digits}f}, {estimate.high * scale:.{digits}f}]"


def _text(result: Comparison) -> str:
    kl, top1, change = result.kl, result.top1, result.nll_difference
    lines = [
        f"predictions      {result.predictions} in {result.windows} windows of {result.window}"
    ]
    for name, side in (("reference", result.ref), ("candidate", result.cand)):
        lines.append(
            f"{name:<16} perplexity {side.perplexity:.6f}  (experts {side.expert_codec}, trunk "
            f"{side.trunk_codec})"
        )
    return "\n".join(
        [
            *lines,
            f"KL divergence    {kl.mean:.6f} nats  {interval(kl, 6)}",
            f"top-1 agreement  {top1.mean:.3%}  {interval(top1, 3, 100)}",
            f"loss difference  {change.mean:+.6f} nats  {interval(change, 6)}",
        ]
    )


class Progress:
    """A bar on a terminal, elsewhere a line for every tenth; on standard error."""

    def __init__(self, talk: bool) -> None:
        self.total = self.done = 0
        self._talk = talk
        self._bar: Any = None

    def started(self, total: int) -> None:
        self.total = total
        if self._talk and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="token", dynamic_ncols=True, file=sys.stderr)

    def progress(self, count: int) -> None:
        tenth = self.done * 10 // self.total
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif self._talk and self.done * 10 // self.total > tenth:
            share = self.done / self.total
            print(f"{self.done} of {self.total} predictions, {share:.0%}", file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def positive(text: str) -> int:
    """argparse type: an integer from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace-kld",
        description="Compare the predictions of two containers of the same tokenizer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ref", metavar="REF", type=Path, help="container to compare with")
    parser.add_argument("cand", metavar="CAND", type=Path, help="container to judge")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", type=Path, help="text to score")
    source.add_argument(
        "--ids", metavar="FILE", type=Path, help="token ids to score, for ids-only containers"
    )
    parser.add_argument(
        "--end", metavar="TEXT", help="control token(s) that follow, such as an end-of-text mark"
    )
    parser.add_argument(
        "--no-special",
        action="store_true",
        help="control tokens spelled in the text are plain text",
    )
    parser.add_argument(
        "--window",
        metavar="N",
        type=positive,
        default=DEFAULT_WINDOW,
        help=f"inputs from one fresh state (default {DEFAULT_WINDOW})",
    )
    parser.add_argument(
        "--limit", metavar="N", type=positive, help="score only the first N windows"
    )
    parser.add_argument(
        "--ram",
        metavar="SIZE",
        help="ceiling on both engines together, such as 8GiB (default: 3/4 of what is available)",
    )
    parser.add_argument("--threads", metavar="N", type=positive, default=0)
    parser.add_argument(
        "--per-position",
        metavar="FILE.npz",
        type=Path,
        help="write target, window, position, kl, nll_ref, nll_cand, top1 of every position",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--version", action="version", version=f"headrace-kld {__version__}")
    return parser


def _engine_exit_code(error: Exception) -> int:
    """The exit code for a ``headrace.HeadraceError``; the same as the command `headrace`'s."""
    headrace = engine()
    if isinstance(error, (headrace.UsageError, headrace.ContextError)):
        return EXIT_USAGE
    if isinstance(error, headrace.HeadraceMemoryError):
        return EXIT_MEMORY
    bad = (headrace.FormatError, headrace.NumericError, headrace.UnsupportedError)
    return EXIT_BAD_INPUT if isinstance(error, bad) else EXIT_IO


def guarded(name: str, work: Callable[[], int], interrupted: Callable[[], str]) -> int:
    """Runs a command; returns its exit code, what stopped it on standard error.

    Args:
        name: of the command, in front of every message.
        interrupted: what to say after Ctrl-C.
    """
    code = EXIT_IO
    try:
        failure = engine().HeadraceError
        try:
            return work()
        except failure as error:
            message, code = str(error), _engine_exit_code(error)
    except KeyboardInterrupt:
        message, code = interrupted(), 130
    except MeasureError as error:
        message, code = str(error), error.exit_code
    except MemoryError:
        message, code = "not enough memory", EXIT_MEMORY
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror or error}"
    print(f"{name}: {message}", file=sys.stderr)
    return code


def _run(args: argparse.Namespace, shown: Progress) -> int:
    if args.per_position is not None:
        check_writable(args.per_position)
    request = Request(
        ref=args.ref,
        cand=args.cand,
        text=args.text,
        ids=args.ids,
        end=args.end,
        special=not args.no_special,
        window=args.window,
        limit=args.limit,
        ram=args.ram,
        threads=args.threads,
    )
    try:
        result = compare(request, shown.progress, shown.started)
    finally:
        shown.close()
    if args.per_position is not None:
        write_positions(args.per_position, result)
    if args.json:
        print(json.dumps(result.as_dict(), sort_keys=True, indent=1))
    else:
        print(_text(result))
    sys.stdout.flush()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    shown = Progress(not args.quiet)
    return guarded(
        "headrace-kld",
        lambda: _run(args, shown),
        lambda: f"interrupted after {shown.done} of {shown.total} predictions",
    )


if __name__ == "__main__":
    sys.exit(main())
