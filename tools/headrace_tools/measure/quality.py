"""python -m headrace_tools.measure.quality SRC: what every codec of the converter costs.

Converts a checkpoint once for each choice of codecs, compares it with the reference container and
prints a Markdown table on standard output.
"""

from __future__ import annotations

import argparse
import json
import shlex
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..convert import cli, options, writer
from ..convert.errors import EXIT_BAD_INPUT, EXIT_USAGE, ConvertError
from ..convert.preflight import preflight, record_layout
from . import scalar
from .compare import DEFAULT_WINDOW, Comparison, Request, compare
from .kld import Progress, guarded, interval, positive

_REFERENCE = "bf16"
# Not a codec but a rule that picks one of the others.
_RULE = "auto"
_TRUNK = "int8"
_SCALAR = "scalar3"
"""Not of the engine: see scalar.py."""
_HYBRID = "hybrid"
"""A codec for every layer, as --budget among the further options decides."""
_CALIBRATED = ("--budget", "--feedback")
"""Options that need a calibration text and a reference."""
_SCALAR_LAYOUT = "rvq4x64"
"""Has the same bits and row scales."""
_END = "<|endoftext|>"
# Where gate and down begin in an expert record (formats/container.md).
_HEADER_BYTES, _GATE_FIELD, _DOWN_FIELD = 64, 32, 48

_EPILOG = """A choice is EXPERTS or EXPERTS/TRUNK, and may be followed by further options of
headrace-convert: --codecs int8 bf16/int8 'int8 --allow-nonfinite'. Without a TRUNK the trunk has
the experts' codec where it can, otherwise int8. EXPERTS may also be hybrid, with --budget SIZE
behind it, and scalar3, a baseline that is no codec of the engine: eight levels and a scale for each
row, run as int8; its sizes are those it would have. Without --codecs: every codec for the experts
with a bf16 trunk, every codec for the trunk with bf16 experts, and every codec for the experts with
an int8 trunk.

Choices with --budget or --feedback are calibrated on the first tenth of the text, and the whole
table is measured on the rest, unless --calibration names another text.

"bits" are those of a weight of the experts' gate and up matrices with their scales; headers,
padding and codebooks are in the sizes only. Exit codes are those of headrace-kld."""


@dataclass(frozen=True)
class Choice:
    """Codecs to convert with, and further options of the converter."""

    experts: str
    trunk: str
    extra: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Choice:
        """From "EXPERTS[/TRUNK] [options]". Raises ValueError for a codec that is not offered."""
        first, *extra = shlex.split(text) or [""]
        experts, _, trunk = first.partition("/")
        trunk = trunk or (experts if experts in options.TRUNK_CODECS else _TRUNK)
        offered = (*options.EXPERT_CHOICES, _SCALAR, _HYBRID)
        for codec, known in ((experts, offered), (trunk, options.TRUNK_CODECS)):
            if codec not in known:
                raise ValueError(f"{text!r}: {codec!r} is none of {', '.join(known)}")
        if (experts == _HYBRID) != ("--budget" in extra):
            raise ValueError(f"{text!r}: {_HYBRID} and --budget go together")
        if experts == _SCALAR and extra:
            raise ValueError(f"{text!r}: {_SCALAR} has no further options")
        return cls(experts, trunk, tuple(extra))

    @property
    def calibrated(self) -> bool:
        """Whether converting needs a calibration text."""
        return any(option in self.extra for option in _CALIBRATED)

    def __str__(self) -> str:
        return " ".join([f"{self.experts}/{self.trunk}", *self.extra])


def choices() -> list[Choice]:
    """All codecs that the converter of this tree offers, each choice once."""
    experts = [codec for codec in options.EXPERT_CHOICES if codec != _RULE]
    trunk = [codec for codec in options.TRUNK_CODECS if codec != _RULE]
    found = [Choice(codec, _REFERENCE) for codec in experts]
    found += [Choice(_REFERENCE, codec) for codec in trunk]
    found += [Choice(codec, _TRUNK) for codec in experts]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Sizes:
    """Bytes of a container and of its parts, and stored bits for a weight of the experts."""

    whole: int
    experts: int
    trunk: int
    bits: float

    @classmethod
    def of(cls, container: Path) -> Sizes:
        manifest = json.loads((container / "manifest.json").read_text(encoding="utf-8"))
        whole = sum(path.stat().st_size for path in container.iterdir())
        total = stored = weights = 0
        for bank in manifest["experts"]:
            path = container / bank["file"]
            total += path.stat().st_size
            with open(path, "rb") as file:
                header = file.read(_HEADER_BYTES)
            gate, down = (
                struct.unpack_from("<Q", header, at)[0] for at in (_GATE_FIELD, _DOWN_FIELD)
            )
            stored += (down - gate) * bank["experts"]
            weights += 2 * bank["hidden"] * bank["inner"] * bank["experts"]
        bits = 8 * stored / weights if weights else 0.0
        trunk = (container / manifest["trunk"]["file"]).stat().st_size
        return cls(whole, total, trunk, bits)

    def as_scalar(self, container: Path) -> Sizes:
        """What the baseline, which is run as this container, would have itself."""
        manifest = json.loads((container / "manifest.json").read_text(encoding="utf-8"))
        experts = stored = weights = 0
        for bank in manifest["experts"]:
            hidden, inner = bank["hidden"], bank["inner"]
            (gate, _, down), _, record = record_layout(
                _SCALAR_LAYOUT, hidden, inner, bank.get("bias", False)
            )
            experts += record * bank["experts"]
            stored += (down - gate) * bank["experts"]
            weights += 2 * hidden * inner * bank["experts"]
        return Sizes(self.whole - self.experts + experts, experts, self.trunk, 8 * stored / weights)


def _row(choice: Choice, sizes: Sizes, perplexity: float, rest: list[str]) -> str:
    experts = " ".join([choice.experts, *choice.extra])
    mb = [f"{count / 1e6:.3f}" for count in (sizes.whole, sizes.experts)]
    cells = [experts, choice.trunk, *mb, f"{sizes.bits:.2f}", f"{perplexity:.3f}", *rest]
    return "| " + " | ".join(cells) + " |"


def _measured(result: Comparison) -> list[str]:
    return [
        f"{result.kl.mean:.6f}",
        interval(result.kl, 6),
        f"{result.top1.mean:.2%}".replace("%", " %"),
    ]


def _convert(source: Path, target: Path, choice: Choice, calibration: list[str]) -> int:
    """Runs the converter; returns its exit code."""
    if choice.experts == _SCALAR:
        return _convert_scalar(source, target, choice.trunk)
    codecs = ["--trunk", choice.trunk]
    codecs += [] if choice.experts == _HYBRID else ["--experts", choice.experts]
    more = [*choice.extra, *(calibration if choice.calibrated else [])]
    return cli.main([str(source), str(target), *codecs, "--quiet", *more])


def _convert_scalar(source: Path, target: Path, trunk: str) -> int:
    try:
        pre = preflight(source, options.Options("int8", trunk))
        pre.raise_faults()
        writer.convert(scalar.stand_in(pre), target)
    except ConvertError as error:
        print(f"quality: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _remove(container: Path) -> None:
    """What a conversion left, whole or not."""
    if container.is_dir():
        for path in sorted(container.iterdir()):
            path.unlink()
        container.rmdir()


@dataclass(frozen=True)
class Texts:
    """What is measured, what follows it, and what calibrated choices are calibrated on."""

    measured: Path
    end: str | None
    calibration: Path | None


def _texts(args: argparse.Namespace, wanted: list[Choice], folder: Path) -> Texts:
    text = args.text or args.source.absolute().parent / "val.txt"
    end = args.end if args.text or args.end else _END
    if args.calibration is not None or not any(choice.calibrated for choice in wanted):
        return Texts(text, end, args.calibration)
    data = text.read_bytes()
    cut = data.find(b"\n", len(data) // 10) + 1
    parts = [folder / name for name in ("calibration.txt", "measured.txt")]
    for path, part in zip(parts, (data[:cut], data[cut:]), strict=True):
        path.write_bytes(part)
    return Texts(parts[1], end, parts[0])


def _table(args: argparse.Namespace, wanted: list[Choice], folder: Path) -> int:
    """Prints the table; returns the exit code."""
    reference = Choice.parse(args.reference)
    base, candidate = folder / "reference", folder / "candidate"
    texts = _texts(args, wanted, folder)
    if code := _convert(args.source, base, reference, []):
        return code
    calibration = ["--calibration", str(texts.calibration), "--reference", str(base)]
    others = [choice for choice in wanted if choice != reference]
    refused = 0
    table = _Table(reference, Sizes.of(base))
    for choice in others or [reference]:
        print(f"quality: {choice}", file=sys.stderr, flush=True)
        target = base if choice == reference else candidate
        if target is candidate and (code := _convert(args.source, candidate, choice, calibration)):
            if code not in (EXIT_USAGE, EXIT_BAD_INPUT):
                return code
            refused = refused or code  # a codec that is not for this checkpoint
            table.add(f"| {choice.experts} | {choice.trunk} | not converted |" + " |" * 6)
            _remove(candidate)
            continue
        request = Request(
            base,
            target,
            text=texts.measured,
            end=texts.end,
            window=args.window,
            limit=args.windows,
            ram=args.ram,
            threads=args.threads,
        )
        shown = Progress(args.progress)
        try:
            result = compare(request, shown.progress, shown.started)
        finally:
            shown.close()
        table.begin(result)
        if target is candidate:
            sizes = Sizes.of(target)
            if choice.experts == _SCALAR:
                sizes = sizes.as_scalar(target)
            table.add(_row(choice, sizes, result.cand.perplexity, _measured(result)))
            _remove(candidate)
    return refused if args.codecs else 0


class _Table:
    """Printed row by row: a long measurement that is cut off leaves what it has measured."""

    def __init__(self, reference: Choice, sizes: Sizes) -> None:
        self._reference, self._sizes = reference, sizes
        self._begun = False
        self._waiting: list[str] = []

    def begin(self, result: Comparison) -> None:
        """Prints the heading and the reference's row, which any comparison knows, once."""
        if self._begun:
            return
        self._begun = True
        print(
            f"{result.predictions:,} predictions in {result.windows} windows of {result.window}; "
            f"KL in nats from {self._reference}, with its 95 % interval.\n"
        )
        names = ["experts", "trunk", "container, MB", "experts, MB", "bits", "perplexity", "KL"]
        print("| " + " | ".join([*names, "interval", "top-1"]) + " |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |")
        perplexity = result.ref.perplexity
        print(_row(self._reference, self._sizes, perplexity, ["0", "", "100 %"]))
        for row in self._waiting:
            print(row)
        sys.stdout.flush()

    def add(self, row: str) -> None:
        """Prints a row, or keeps it until the heading is printed."""
        if self._begun:
            print(row, flush=True)
        else:
            self._waiting.append(row)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headrace_tools.measure.quality",
        description="A table of what every codec costs in quality.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="checkpoint directory")
    parser.add_argument("--codecs", metavar="CHOICE", nargs="+", help="what to measure, in order")
    parser.add_argument(
        "--reference", metavar="CHOICE", default=_REFERENCE, help=f"default {_REFERENCE}"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help=f"text to score (default: val.txt beside SRC, with {_END} behind it)",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", type=Path, help="text for --budget and --feedback"
    )
    parser.add_argument("--end", metavar="TEXT", help="control token(s) that follow the text")
    parser.add_argument("--window", metavar="N", type=positive, default=DEFAULT_WINDOW)
    parser.add_argument("--windows", metavar="N", type=positive, help="only the first N windows")
    parser.add_argument("--ram", metavar="SIZE", help="ceiling on both engines together")
    parser.add_argument("--threads", metavar="N", type=positive, default=0)
    parser.add_argument(
        "--work", metavar="DIR", type=Path, help="where the containers are made, and removed again"
    )
    parser.add_argument("--progress", action="store_true", help="progress within every comparison")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        wanted = [Choice.parse(text) for text in args.codecs] if args.codecs else choices()
        Choice.parse(args.reference)
    except ValueError as error:
        parser.error(str(error))

    def work() -> int:
        with tempfile.TemporaryDirectory(prefix="headrace-quality-", dir=args.work) as folder:
            return _table(args, wanted, Path(folder))

    return guarded("quality", work, lambda: "interrupted")


if __name__ == "__main__":
    sys.exit(main())
