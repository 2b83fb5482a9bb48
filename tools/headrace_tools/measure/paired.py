"""headrace-bench A B: which of two is faster, on a machine that does not keep still.

The unit is a bracket: A, B and A again, each a run of `headrace bench`. A bracket whose two A differ
by more than the drift limit says more about the machine than about B and is discarded. The ratio B / A
of a bracket takes the mean of its two A; the result is the geometric mean over brackets.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from .. import __version__
from ..convert.errors import EXIT_IO, EXIT_USAGE
from .compare import MeasureError
from .divergence import Estimate, estimates
from .kld import positive

EXIT_UNSTEADY = 1
METRICS = ("decode", "prefill", "bytes")

_EPILOG = """A and B are containers; --a and --b hold a container and options of `headrace bench` instead,
such as --a "MODEL --ram 4GiB" --b "MODEL --ram 8GiB". With one of them only, both sides are that one:
two binaries are compared with --binary-a OLD --binary-b NEW. Options behind -- go to both sides:

  headrace-bench A B --brackets 8 -- --prefill 64 --decode 64 --ids tokens.txt --cold

decode and prefill are tokens a second, bytes those read for a decoded token. A ratio is B over A with
a 95 % interval (bootstrap over brackets).

exit codes: 0 ok, 1 the machine was too unsteady for two brackets, 2 usage, 130 interrupted, else what
the run that failed ended with."""


@dataclass(frozen=True)
class Side:
    """What one of the two runs: the command without its common options."""

    binary: str
    arguments: tuple[str, ...]

    def command(self, common: tuple[str, ...]) -> list[str]:
        return [self.binary, "bench", *self.arguments, *common, "--json"]


Figures = dict[str, float | None]
"""Metric -> its value in one run; None where that was not measured."""


def run(command: list[str]) -> Figures:
    """One run of `headrace bench`.

    Raises MeasureError with the command's exit code when it fails, or when it printed no result.
    """
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise MeasureError(f"{command[0]}: {error.strerror}", EXIT_USAGE) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        code = done.returncode if done.returncode > 0 else EXIT_IO
        raise MeasureError(f"{shlex.join(command)}: exit code {done.returncode}: {reason}", code)
    try:
        return figures(json.loads(done.stdout))
    except (ValueError, KeyError, TypeError):
        raise MeasureError(f"{shlex.join(command)}: printed no result", EXIT_IO) from None


def figures(result: dict[str, dict[str, float] | None]) -> Figures:
    """The metrics of a `bench --json` object."""
    decode, prefill = result["decode"], result["prefill"]
    return {
        "decode": decode and float(decode["tokens_per_second"]),
        "prefill": prefill and float(prefill["tokens_per_second"]),
        "bytes": decode and float(decode["bytes_per_token"]),
    }


def spread(first: float, second: float) -> float:
    """How far two values are apart, in units of their mean."""
    middle = (first + second) / 2
    return abs(first - second) / middle if middle else 0.0


@dataclass(frozen=True)
class Bracket:
    """The figures of A, B, and A again, and how far the two A are apart in the chosen metric."""

    before: Figures
    other: Figures
    after: Figures
    drift: float

    def ratio(self, metric: str) -> float | None:
        """B over the mean of both A; None where a side has no value or A is 0."""
        before, other, after = (f[metric] for f in (self.before, self.other, self.after))
        if before is None or other is None or after is None or not before + after:
            return None
        return 2 * other / (before + after)

    def as_dict(self, limit: float) -> dict[str, object]:
        return {
            "a": [self.before, self.after],
            "b": self.other,
            "drift": self.drift,
            "accepted": self.drift <= limit,
        }


@dataclass
class Paired:
    """All brackets of a comparison."""

    a: Side
    b: Side
    common: tuple[str, ...]
    metric: str
    limit: float
    brackets: list[Bracket] = field(default_factory=list)

    @property
    def accepted(self) -> list[Bracket]:
        return [bracket for bracket in self.brackets if bracket.drift <= self.limit]

    def ratio(self, metric: str) -> Estimate | None:
        """Geometric mean over the accepted brackets with its interval; None without values."""
        ratios = [bracket.ratio(metric) for bracket in self.accepted]
        usable = [ratio for ratio in ratios if ratio]
        if not usable:
            return None
        (logs,) = estimates([np.log(np.array(usable))], 1)
        bounds = [None if bound is None else math.exp(bound) for bound in (logs.low, logs.high)]
        return Estimate(math.exp(logs.mean), *bounds)

    def values(self, metric: str) -> tuple[float | None, float | None]:
        """Medians of A and of B over the accepted brackets."""
        first = [f[metric] for b in self.accepted for f in (b.before, b.after)]
        second = [b.other[metric] for b in self.accepted]
        known = ([v for v in side if v is not None] for side in (first, second))
        a, b = (median(side) if side else None for side in known)
        return a, b

    def as_dict(self) -> dict[str, object]:
        metrics: dict[str, object] = {}
        for metric in METRICS:
            estimate, (a, b) = self.ratio(metric), self.values(metric)
            interval = None
            if estimate is not None and estimate.low is not None:
                interval = [estimate.low, estimate.high]
            ratio = estimate and estimate.mean
            metrics[metric] = {"a": a, "b": b, "ratio": ratio, "interval": interval}
        return {
            "version": __version__,
            "commands": [side.command(self.common) for side in (self.a, self.b)],
            "metric": self.metric,
            "drift_limit": self.limit,
            "accepted": len(self.accepted),
            "discarded": len(self.brackets) - len(self.accepted),
            "metrics": metrics,
            "brackets": [bracket.as_dict(self.limit) for bracket in self.brackets],
        }


def compare_paired(
    paired: Paired, wanted: int, tries: int, done: Callable[[Bracket], None] = lambda bracket: None
) -> None:
    """Runs brackets until `wanted` are accepted, at most `tries`.

    Raises MeasureError when a run fails or does not measure the metric.
    """
    while len(paired.accepted) < wanted and len(paired.brackets) < tries:
        found = []
        for side in (paired.a, paired.b, paired.a):
            command = side.command(paired.common)
            found.append(run(command))
            if found[-1][paired.metric] is None:
                raise MeasureError(
                    f"{shlex.join(command)}: {paired.metric} was not measured", EXIT_USAGE
                )
        drift = spread(*(float(found[i][paired.metric] or 0) for i in (0, 2)))
        bracket = Bracket(*found, drift)
        paired.brackets.append(bracket)
        done(bracket)


def _text(paired: Paired) -> str:
    lines = [
        f"{len(paired.accepted)} brackets, {len(paired.brackets) - len(paired.accepted)} discarded "
        f"(drift in {paired.metric} above {paired.limit:.0%})"
    ]
    for metric, name, scale, unit in (
        ("decode", "decode", 1.0, "tokens/s"),
        ("prefill", "prefill", 1.0, "tokens/s"),
        ("bytes", "read", 1e-6, "MB/token"),
    ):
        estimate, (a, b) = paired.ratio(metric), paired.values(metric)
        if a is None or b is None:
            continue
        line = f"{name:<8} A {a * scale:.2f}  B {b * scale:.2f} {unit}"
        if estimate is not None:
            line += f"  B/A {estimate.mean:.3f}"
        if estimate is not None and estimate.low is not None:
            line += f"  [{estimate.low:.3f}, {estimate.high:.3f}]"
        lines.append(line)
    return "\n".join(lines)


def _share(text: str) -> float:
    """argparse type: "5" or "5%" -> 0.05."""
    value = float(text.removesuffix("%")) / 100
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 100 percent")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace-bench",
        description="Compare the speed of two binaries, containers or sets of options.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("containers", metavar="CONTAINER", nargs="*", help="A and B")
    parser.add_argument("--a", metavar="ARGUMENTS", help="container and options of A")
    parser.add_argument("--b", metavar="ARGUMENTS", help="container and options of B")
    parser.add_argument("--binary", default="headrace", help="of both (default: headrace)")
    parser.add_argument("--binary-a", metavar="BINARY")
    parser.add_argument("--binary-b", metavar="BINARY")
    parser.add_argument("--metric", choices=METRICS, default="decode", help="default decode")
    parser.add_argument("--brackets", metavar="N", type=positive, default=5, help="default 5")
    parser.add_argument(
        "--tries", metavar="N", type=positive, help="at most N brackets, discarded ones counted "
        "(default: three times --brackets)",
    )  # fmt: skip
    parser.add_argument(
        "--drift", metavar="PERCENT", type=_share, default=0.05,
        help="most that the two A of a bracket may differ (default 5)",
    )
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--quiet", action="store_true", help="no line for every bracket")
    return parser


def _sides(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[Side, Side]:
    given = [args.a, args.b]
    free = [shlex.quote(container) for container in args.containers]
    for i in (0, 1):
        if given[i] is None and free:
            given[i] = free.pop(0)
    if free or given == [None, None]:
        parser.error("give A and B, as containers or with --a and --b")
    texts = [given[0] or given[1], given[1] or given[0]]
    binaries = [args.binary_a or args.binary, args.binary_b or args.binary]
    for binary in binaries:
        if shutil.which(binary) is None:
            parser.error(f"{binary} is no program (--binary names one)")
    sides = [Side(b, tuple(shlex.split(t))) for b, t in zip(binaries, texts, strict=True)]
    if sides[0] == sides[1] and None in given:
        parser.error("A and B are the same")
    return sides[0], sides[1]


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser()
    args = parser.parse_args(words[:cut])
    a, b = _sides(parser, args)
    paired = Paired(a, b, tuple(words[cut + 1 :]), args.metric, args.drift)

    def shown(bracket: Bracket) -> None:
        if args.quiet:
            return
        ratio = bracket.ratio(args.metric)
        fate = "" if bracket.drift <= args.drift else ", discarded"
        text = "no ratio" if ratio is None else f"B/A {ratio:.3f}"
        print(f"{text}, drift {bracket.drift:.1%}{fate}", file=sys.stderr, flush=True)

    try:
        compare_paired(paired, args.brackets, args.tries or 3 * args.brackets, shown)
    except MeasureError as error:
        print(f"headrace-bench: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"headrace-bench: interrupted after {len(paired.brackets)} brackets", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(paired.as_dict(), sort_keys=True, indent=1))
    else:
        print(_text(paired))
    sys.stdout.flush()
    if len(paired.accepted) < min(2, args.brackets):
        print("headrace-bench: too unsteady: give more --tries or a larger --drift", file=sys.stderr)
        return EXIT_UNSTEADY
    return 0


if __name__ == "__main__":
    sys.exit(main())
