"""headrace-convert SRC DST: from a Hugging Face checkpoint to a Headrace container."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .. import __version__
from . import allocation, feedback, paths, requantised
from .errors import EXIT_IO, EXIT_MEMORY, EXIT_USAGE, ConvertError
from .options import EFFORTS, EXPERT_CHOICES, RVQ_CODECS, TRUNK_CODECS, Options
from .preflight import Preflight, check_places, plan_report, preflight
from .writer import already_converted, convert, manifest_to_be

_EPILOG = """exit codes: 0 ok, 2 usage, 3 bad input, 4 not enough memory, 5 I/O (disk full),
130 interrupted. An interrupted conversion continues when the same command is given again."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace-convert",
        description="Convert a Hugging Face checkpoint to a Headrace container.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", metavar="SRC", help="checkpoint directory (config.json, *.safetensors)"
    )
    parser.add_argument("target", metavar="DST", nargs="?", help="container directory to write")
    parser.add_argument(
        "--experts",
        choices=EXPERT_CHOICES,
        help="codec of the routed experts; auto (the default): a 4-bit source as it is, without "
        "loss, any other as int8; rvq3 and rvq2: residual vector quantisation at 3 and 2 bits. A "
        "4-bit source in another codec is quantised once more, and what that costs is measured "
        "and shown",
    )
    parser.add_argument(
        "--effort",
        choices=EFFORTS,
        default="default",
        help="how hard rvq experts are encoded: high takes twice the time for 0.15 dB less noise; "
        "greedy is a baseline for comparisons",
    )
    parser.add_argument(
        "--activations",
        type=int,
        choices=(8, 22),
        help="bits of the activations that mxfp4 experts are multiplied with; default 22, as exact as "
        "float32, for experts that are MXFP4 in the source, and 8 for others; 8 is up to three times "
        "as fast for many tokens and costs what int8 activations cost",
    )
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        type=_argument(allocation.parse_size),
        help="instead of --experts: a codec for every layer, chosen by measured output error so "
        "that the container has at most SIZE (such as 18GiB); needs --calibration and --reference",
    )
    parser.add_argument(
        "--feedback",
        action="store_true",
        help="encode rvq experts so that their products, not their weights, are near: later weights "
        "of a row make up for the errors of earlier ones; needs --calibration and --reference, and "
        "two to three times as long for a large model",
    )
    parser.add_argument(
        "--calibration",
        metavar="TEXT",
        type=_path,
        help="with --budget or --feedback: a text to measure on",
    )
    parser.add_argument(
        "--reference",
        metavar="CONTAINER",
        type=_path,
        help="with --budget or --feedback: a container of the same checkpoint, bf16 or int8, "
        "that runs the text",
    )
    parser.add_argument(
        "--candidates",
        metavar="CODECS",
        type=_argument(allocation.parse_candidates),
        help="with --budget: what to choose from, separated by commas (default "
        f"{','.join(allocation.CANDIDATES)})",
    )
    parser.add_argument(
        "--trunk",
        choices=TRUNK_CODECS,
        default="int8",
        help="codec of the resident matrices (default int8); with nl4, embedding and head are int8",
    )
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="make a container for token ids only"
    )
    parser.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="store NaN and Inf weights as 0 instead of stopping",
    )
    parser.add_argument(
        "--allow-rounding",
        action="store_true",
        help="with bf16: round what bf16 cannot hold (F32, F16 and FP8 sources) instead of "
        "storing it as f32",
    )
    parser.add_argument(
        "--plan", action="store_true", help="check everything, print the cost, write nothing"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the container or unfinished conversion in DST",
    )
    parser.add_argument(
        "--hash-source",
        action="store_true",
        help="record the SHA-256 of every source shard (reads them all)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, no notes")
    parser.add_argument("--version", action="version", version=f"headrace-convert {__version__}")
    return parser


def _argument(parse: Callable[[str], object]) -> Callable[[str], object]:
    """An argparse type that shows what ValueError says."""

    def convert_argument(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert_argument


def _path(text: str) -> Path:
    return (
        Path(os.path.expanduser(text))
        if text.startswith("~") and not os.path.lexists(text)
        else Path(text)
    )


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError


def human_seconds(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{seconds:.0f} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole >= 3600 else f"{whole // 60} min"


def _span(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _plan_text(report: dict[str, object], pre: Preflight) -> str:
    """The report for people."""
    sizes = pre.source_bytes
    lines = [
        f"source      {pre.name}: {report['family']}, {report['source_tensors']} tensors "
        f"in {len(pre.checkpoint.shards)} file(s)",
        f"            text {sizes['text']:,} bytes, experts {sizes['experts']:,} bytes",
    ]
    for kind, what in pre.skipped.items():
        if isinstance(what, dict):
            lines.append(f"skipped     {kind}: {what['tensors']} tensors, {what['bytes']:,} bytes")
        else:
            lines.append(f"skipped     {kind}: {', '.join(what)}")  # type: ignore[arg-type]
    bank = pre.banks[0] if pre.banks else None
    lines.append(f"parameters  {pre.parameters:,}")
    lines.append(f"trunk.bin   {pre.trunk_bytes:,} bytes ({pre.options.trunk})")
    if bank is not None:
        total = sum(b.nbytes for b in pre.banks)
        lines.append(
            f"experts     {total:,} bytes ({', '.join(sorted({b.described for b in pre.banks}))}): "
            f"{len(pre.banks)} files "
            f"of {_span([b.nbytes for b in pre.banks])}, {bank.spec.experts} records of "
            f"{_span([b.record_bytes for b in pre.banks])}"
        )
    if pre.ngram is not None:
        lines.append(
            f"ngram.bin   {pre.ngram.nbytes:,} bytes ({pre.ngram.codec}): "
            f"{pre.ngram.spec.rows:,} rows of {pre.ngram.row_bytes}"
        )
    if pre.tokenizer is not None:
        lines.append(f"tokenizer   {len(pre.tokenizer):,} bytes")
    if (chosen := pre.options.allocation) is not None:
        lines += allocation.table_text(chosen)
    fits = "enough" if report["fits"] else "NOT ENOUGH"
    lines += [
        f"output      {report['output_bytes']:,} bytes ({human_bytes(pre.output_bytes())}), "  # type: ignore[arg-type]
        f"{float(report['overhead_share']):.1%} of it padding and scales",  # type: ignore[arg-type]
        f"disk        {human_bytes(report['free_bytes'])} free: {fits}",  # type: ignore[arg-type]
        f"memory      about {human_bytes(pre.peak_ram())} at most",
        f"time        about {human_seconds(float(report['seconds']))}",  # type: ignore[arg-type]
        f"stop ids    {', '.join(map(str, pre.stop_ids)) or 'none'}",
    ]
    if isinstance(running := report["running"], dict):
        floor, recommended, cold = (human_bytes(value) for value in running.values())
        lines.append(f"to run      ram {floor} at least, {recommended} recommended; a token reads "
                     f"{cold} of experts (headrace-plan forecasts the speed)")
    lines += [f"note        {note}" for note in pre.notes]
    return "\n".join(lines)


def _memory_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _engine_verify() -> Callable[[Path], None] | None:
    """The engine's verification, when the `headrace` package and its library are here."""
    try:
        import headrace

        headrace.version()
        engine, engine_error = headrace.verify, headrace.HeadraceError
    except (ImportError, AttributeError, OSError):
        return None

    def verify(path: Path) -> None:
        try:
            faults = engine(path)
        except engine_error as error:
            raise ConvertError(
                f"{path}: the engine refuses the result: {error}", EXIT_IO
            ) from error
        if faults:
            raise ConvertError(
                "\n  ".join([f"{path}: the engine finds faults in the result:", *faults]), EXIT_IO
            )

    return verify


def _running(pre: Preflight) -> dict[str, int] | None:
    """Bytes that the container takes to run, by the engine when it is here: the floor, the ram that
    holds everything or is safe, and what a token reads from disk when nothing is cached."""
    try:
        import headrace

        plan = headrace.plan_manifest(manifest_to_be(pre))
    except (ImportError, AttributeError, OSError):
        return None
    except headrace.HeadraceError as error:
        pre.notes.append(f"the engine does not plan this container: {error}")
        return None
    return {
        "floor": plan.floor,
        "recommended": plan.recommended,
        "bytes_per_token_cold": plan.experts_per_token,
    }


def _convert(pre: Preflight, target: Path, args: argparse.Namespace) -> dict[str, object]:
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    talk = not args.quiet
    total = sum(pre.files().values())
    bar = tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        disable=not (talk and terminal),
        file=sys.stderr,
    )
    begun = time.monotonic()
    done = 0

    def started(count: int) -> None:
        nonlocal done
        done = bar.n = bar.initial = count  # what is there already says nothing about the rate
        bar.refresh()

    def progress(count: int) -> None:
        nonlocal done
        done += count
        bar.update(count)

    def file_done(name: str) -> None:
        if talk and not terminal:
            print(f"{name} written, {done / total:.0%}", file=sys.stderr, flush=True)

    def checking() -> None:
        bar.close()
        if talk:
            print("headrace-convert: checking every byte", file=sys.stderr, flush=True)

    try:
        resumed = convert(
            pre,
            target,
            overwrite=args.overwrite,
            progress=progress,
            hash_source=args.hash_source,
            verify=_engine_verify(),
            started=started,
            file_done=file_done,
            checking=checking,
        )
    finally:
        bar.close()
    return {"resumed": resumed, "seconds": round(time.monotonic() - begun, 2)}


def _allocation_request(args: argparse.Namespace) -> allocation.Request | None:
    """What --budget and its companions ask for. Raises ConvertError (usage)."""
    asks = "--budget" if args.budget is not None else "--feedback" if args.feedback else None
    for flag, value in (("--calibration", args.calibration), ("--reference", args.reference)):
        if asks is not None and value is None:
            raise ConvertError(f"{asks} needs {flag}", EXIT_USAGE)
        if asks is None and value is not None:
            raise ConvertError(
                f"{flag} means nothing without --budget or --feedback", EXIT_USAGE
            )
    if args.budget is not None and args.experts is not None:
        raise ConvertError("--budget chooses the codecs: leave --experts out", EXIT_USAGE)
    if args.budget is None and args.candidates is not None:
        raise ConvertError("--candidates means nothing without --budget", EXIT_USAGE)
    candidates = args.candidates or allocation.CANDIDATES
    chosen = (args.experts,) if args.budget is None else candidates
    if args.feedback and not set(chosen) & set(RVQ_CODECS):
        raise ConvertError(
            f"--feedback is for experts in {', '.join(RVQ_CODECS)} only", EXIT_USAGE
        )
    if args.budget is None:
        return None
    return allocation.Request(args.budget, args.calibration, args.reference, candidates)


def _measure(
    args: argparse.Namespace, work: Callable[[Callable[[str, int, int], object]], Preflight]
) -> Preflight:
    """Runs `work` with a progress display."""
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what not in bars:
            bars[what] = tqdm(
                total=total,
                desc=f"calibration, {what}",
                dynamic_ncols=True,
                disable=args.quiet or not sys.stderr.isatty(),
                file=sys.stderr,
            )
        bars[what].update(done - bars[what].n)

    if not args.quiet:
        print("headrace-convert: measuring on the calibration text", file=sys.stderr)
    try:
        return work(progress)
    finally:
        for bar in bars.values():
            bar.close()


def _run(args: argparse.Namespace) -> int:
    source = _path(args.source)
    if args.target is None and not args.plan:
        raise ConvertError("DST is missing (only --plan works without it)", EXIT_USAGE)
    target = _path(args.target) if args.target is not None else Path(os.curdir)
    if args.target is not None:
        check_places(source, target)
    request = _allocation_request(args)
    options = Options(args.experts or "auto", args.trunk, not args.no_tokenizer, args.allow_nonfinite,
                      args.allow_rounding, effort=args.effort, activations=args.activations)
    pre = preflight(source, options)
    if args.feedback and not pre.faults:
        pre = feedback.request(pre, args.calibration, args.reference)
    if request is not None and not pre.faults:
        planned, earlier = pre, None if args.target is None else target
        pre = _measure(args, lambda told: allocation.allocate(planned, request, earlier, told))
    if args.activations and pre.banks and not any(b.codec == "mxfp4" for b in pre.banks):
        raise ConvertError("--activations is for experts in mxfp4, and there are none", EXIT_USAGE)
    if args.plan:
        if pre.plan.tensors:
            running = None if pre.faults else _running(pre)
            report = plan_report(pre, target) | {"running": running}
            if args.json:
                print(json.dumps(report, sort_keys=True, indent=1))
            elif not pre.faults:
                print(_plan_text(report, pre))
        pre.raise_faults()
        return 0
    pre.raise_faults()
    if not args.quiet:
        for note in pre.notes:
            print(f"headrace-convert: note: {note}", file=sys.stderr)
    available = _memory_available()
    if available is not None and pre.peak_ram() > available:
        raise ConvertError(
            f"{source}: about {pre.peak_ram()} bytes of memory are needed, "
            f"{available} are available",
            EXIT_MEMORY,
        )
    result: dict[str, object] = {"target": str(target), "output_bytes": sum(pre.files().values())}
    if paths.is_directory(target) and not args.overwrite and already_converted(pre, target):
        result["already_converted"] = True
        if not args.quiet:
            print(
                f"headrace-convert: {target}: already converted with these options, nothing to do",
                file=sys.stderr,
            )
    else:
        if args.feedback and pre.feedback is None:
            before = pre
            pre = _measure(args, lambda told: feedback.gather(
                before, args.calibration, args.reference,
                lambda done, total: told("tokens", done, total)))
        result.update(_convert(pre, target, args))
        if not args.quiet:
            print(f"headrace-convert: {target}: done in {result['seconds']} s", file=sys.stderr)
    if (cost := requantised.of_container(target)) is not None:
        result[requantised.KEY] = cost
        for line in [] if args.quiet else requantised.lines(cost):
            print(f"headrace-convert: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps(result, sort_keys=True, indent=1))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code of architecture section "Commands"."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except ConvertError as error:
        print(f"headrace-convert: {error}", file=sys.stderr)
        return error.exit_code
    except MemoryError:
        print("headrace-convert: not enough memory", file=sys.stderr)
        return EXIT_MEMORY
    except KeyboardInterrupt:
        print(
            "headrace-convert: interrupted; give the same command again to continue",
            file=sys.stderr,
        )
        return 130
    except OSError as error:
        where = error.filename or f"{args.source} -> {args.target}"
        print(f"headrace-convert: {where}: {error.strerror or error}", file=sys.stderr)
        return EXIT_IO


if __name__ == "__main__":
    sys.exit(main())
