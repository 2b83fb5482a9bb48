"""headrace-plan SRC: will a checkpoint run here once it is converted, how fast, and in which codec."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import headrace

from .. import __version__
from ..convert.cli import human_bytes
from ..convert.errors import EXIT_BAD_INPUT, EXIT_IO, EXIT_MEMORY, EXIT_USAGE, ConvertError
from ..convert.options import EXPERT_CHOICES, TRUNK_CODECS, Options
from ..convert.preflight import free_bytes, preflight
from ..simulate.trace import Trace, TraceError, read_trace
from . import candidates as plans

_EPILOG = """Only headers of the checkpoint are read, and the drive is measured with two seconds of reads.
Bands hold what the drive's noise and the hit rate leave open; --trace narrows them: `headrace trace`
of a container of the same model and a text of yours.

exit codes: 0 one of the codecs is ready or warned of, 2 usage, 3 bad input, 4 none fits, 5 I/O,
130 interrupted."""

_LEVERS = {"ram": "more ram", "faster_drive": "a drive twice as fast", "second_drive": "a second drive",
           "codec": "experts in rvq3", "threads": "twice the cores"}


def _codecs(text: str) -> list[str]:
    values = [one.strip() for one in text.split(",") if one.strip()]
    if not values or set(values) - set(EXPERT_CHOICES):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {','.join(EXPERT_CHOICES)}")
    return list(dict.fromkeys(values))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace-plan",
        description="Forecast memory and speed of a checkpoint before it is converted.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="checkpoint directory")
    parser.add_argument("--experts", metavar="CODECS", type=_codecs,
                        help="codecs of the routed experts to compare, separated by commas")
    parser.add_argument("--trunk", choices=TRUNK_CODECS, default="int8",
                        help="codec of the resident matrices (default int8)")
    parser.add_argument("--no-tokenizer", action="store_true", help="as for headrace-convert")
    parser.add_argument("--target", metavar="DIR", type=Path,
                        help="where the container will lie (default: beside the checkpoint)")
    parser.add_argument("--ram", metavar="SIZE", help="hard ceiling on memory (default: 3/4 of what "
                        "is available)")
    parser.add_argument("--ctx", metavar="N", type=int, default=4096)
    parser.add_argument("--threads", metavar="N", type=int, default=0)
    parser.add_argument("--io-threads", metavar="N", type=int, default=0)
    parser.add_argument("--seconds", metavar="S", type=float, default=2.0,
                        help="of reading from the drive (default 2)")
    parser.add_argument("--trace", metavar="FILE", type=Path,
                        help="routes of this model: their hits instead of other models'")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--version", action="version", version=f"headrace-plan {__version__}")
    return parser


def _misses(trace: Trace | None, plan: headrace.Plan) -> list[float] | None:
    """Shares of layers that miss 0, 1, ... experts with this plan's cache."""
    if trace is None:
        return None
    trace.check_model(plan.moe_layers, plan.experts, plan.top_k)
    found = headrace.simulate(trace.routes, plan.cache_slots, experts=plan.experts,
                              warm_up=trace.routes.shape[0] // 4)
    return found.miss_shares


def _with_room(forecast: headrace.Forecast, needed: int, free: int) -> headrace.Forecast:
    """The forecast, and whether the drive can take the container at all."""
    if needed <= free:
        return forecast
    text = f"the container takes {human_bytes(needed)} and {human_bytes(free)} are free"
    return replace(forecast, verdict="no", reasons=(("no", text), *forecast.reasons))


def _detail(candidate: plans.Candidate, probe: headrace.Probe,
            forecast: headrace.Forecast) -> list[str]:
    plan = candidate.plan
    lines = [f"--experts {candidate.experts}: {forecast.verdict}"]
    lines += [f"  {grade:9} {text}" for grade, text in forecast.reasons]
    lines.append(f"  memory    ram {human_bytes(plan.ram)}, floor {human_bytes(plan.floor)}, recommended "
                 f"{human_bytes(plan.recommended)}; {plan.cache_slots} of {plan.total_experts} experts "
                 "cached")
    lines.append(f"  a token   {human_bytes(plan.trunk_per_token)} of trunk and "
                 f"{human_bytes(plan.experts_per_token)} of experts from memory, "
                 f"{human_bytes(forecast.bytes_read)} of them from disk")
    lines.append(f"  compute   memory {probe.memory_rate / 1e9:.1f} GB/s, experts "
                 f"{probe.expert_rate / 1e9:.1f}, trunk {probe.trunk_rate / 1e9:.1f}")
    helps = [f"{_LEVERS[name]} {rate:.2f}" + (" (helps most)" if name == forecast.best_lever else "")
             for name, rate in forecast.levers.items()]
    if helps:
        lines.append(f"  with      {', '.join(helps)} tokens/s")
    return lines


def _text(found: list[tuple[plans.Candidate, headrace.Probe, headrace.Forecast]],
          notes: list[str]) -> str:
    probe = found[0][1]
    lines = []
    if probe.disk:
        rates = ", ".join(f"{r.bytes_per_second / 1e9:.2f} GB/s at {r.depth}" for r in probe.disk if r.reads)
        lines.append(f"drive {probe.device or 'unknown'} ({probe.filesystem or 'unknown'}): {rates} in flight"
                     f"{'' if probe.cold else ', NOT PROVEN COLD'}")
    lines.append(f"{'experts':8} {'container':>11} {'hits':>6} {'read/token':>11} {'tokens/s':>9} "
                 f"{'between':>15}  limit")
    for candidate, _, forecast in found:
        band = f"{forecast.low:.2f} and {forecast.high:.2f}"
        lines.append(f"{candidate.experts:8} {human_bytes(candidate.bytes):>11} {forecast.hit_rate:6.0%} "
                     f"{human_bytes(forecast.bytes_read):>11} {forecast.tokens_per_second:9.2f} {band:>15}"
                     f"  {forecast.limit}")
    for candidate, measured, forecast in found:
        lines += ["", *_detail(candidate, measured, forecast)]
    lines += ["", *(f"note      {note}" for note in notes)] if notes else []
    return "\n".join(lines)


def _run(args: argparse.Namespace) -> int:
    pre = preflight(args.source, Options("int8", args.trunk, not args.no_tokenizer))
    pre.raise_faults()
    trace = read_trace(args.trace) if args.trace is not None else None
    # Beside the checkpoint, not in it.
    target = args.target or Path(os.path.abspath(args.source)).parent
    choices = args.experts or plans.default_choices(pre)
    options = plans.candidates(pre, choices, ram=args.ram, ctx=args.ctx, threads=args.threads,
                               io_threads=args.io_threads)
    place = plans.place_to_probe(pre, target, max(c.plan.record_bytes for c in options))
    free = free_bytes(target)
    found = []
    for candidate in options:
        disk = found[0][1] if found else None
        probe = plans.measure(candidate, place, args.seconds, disk)
        forecast = plans.forecast(candidate, probe, _misses(trace, candidate.plan))
        found.append((candidate, probe, _with_room(forecast, candidate.bytes, free)))
    if args.json:
        print(json.dumps({
            "source": pre.name, "family": pre.plan.family, "parameters": pre.parameters,
            "probed": str(place), "free_bytes": free, "notes": pre.notes,
            "choices": [{"experts": c.experts, "codec": c.codec, "container_bytes": c.bytes,
                         "plan": asdict(c.plan), "probe": asdict(p), "forecast": asdict(f)}
                        for c, p, f in found]}, indent=1))
    else:
        print(_text(found, pre.notes))
    return EXIT_MEMORY if all(f.verdict == "no" for _, _, f in found) else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except ConvertError as error:
        print(f"headrace-plan: {error}", file=sys.stderr)
        return error.exit_code
    except TraceError as error:
        print(f"headrace-plan: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except headrace.UsageError as error:
        print(f"headrace-plan: {error}", file=sys.stderr)
        return EXIT_USAGE
    except headrace.HeadraceError as error:
        print(f"headrace-plan: {args.source}: {error}", file=sys.stderr)
        return EXIT_IO if isinstance(error, headrace.HeadraceIOError) else EXIT_BAD_INPUT
    except OSError as error:
        print(f"headrace-plan: {error.filename or args.source}: {error.strerror}", file=sys.stderr)
        return EXIT_IO
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
