"""headrace-simulate TRACE: what caches of several sizes and policies make of recorded routes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import headrace

from .. import __version__
from .belady import belady
from .trace import Trace, TraceError, read_trace

EXIT_USAGE, EXIT_BAD_INPUT, EXIT_MEMORY, EXIT_IO = 2, 3, 4, 5
ENGINE_POLICIES = ("auto", "lru", "lfu")
POLICIES = (*ENGINE_POLICIES, "belady")
_EPILOG = """Policies are the engine's own, run by its library; belady knows the future and is what no
cache can exceed. A trace is recorded by `headrace trace MODEL -f TEXT -o TRACE`.

With --model and --ram the forecast of `headrace doctor` is made with the misses that were found.

--read-ahead needs a trace recorded with `headrace trace --read-ahead N`. Then time is counted layer by
layer: a layer takes its arithmetic or its reads, whichever is longer, and the drive goes on with what is
read ahead while the layer computes (docs/performance.md). Misses include what was read ahead and used;
with --cache the buffers of 2N experts come on top, with --ram they are taken from it.

exit codes: 0 ok, 2 usage, 3 bad trace, 4 the model does not fit, 5 I/O, 130 interrupted."""


@dataclass(frozen=True)
class Row:
    """One cache. bytes_per_token is None when the size of an expert is unknown; tokens_per_second and
    limit are None when nothing was said of the drive. The rest is None without --read-ahead: ranks read
    ahead; experts so read, used, in vain, taken back; bytes for a token of the used and of those in vain;
    misses of a token that nothing was read ahead for; share of the wanted records' reading time that no
    token waited for."""

    policy: str
    slots: int
    working_sets: float
    ram: str | None
    hits: int
    misses: int
    tokens: int
    hit_rate: float
    bytes_per_token: float | None
    tokens_per_second: float | None
    limit: str | None
    read_ahead: int | None = None
    ahead_issued: int | None = None
    ahead_used: int | None = None
    ahead_wasted: int | None = None
    ahead_cancelled: int | None = None
    useful_bytes_per_token: float | None = None
    wasted_bytes_per_token: float | None = None
    misses_left_per_token: float | None = None
    hidden: float | None = None


def _list(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _sets(text: str) -> list[float]:
    try:
        values = [float(one) for one in _list(text)]
    except ValueError:
        values = []
    if not values or not all(0 <= v <= 1e6 for v in values):
        raise argparse.ArgumentTypeError(f"{text!r}: give sizes in working sets, such as 0.25,1,4")
    return values


def _widths(text: str) -> list[int]:
    values = [int(one) if one.isdecimal() else -1 for one in _list(text)]
    if not values or not all(0 <= v <= 64 for v in values):
        raise argparse.ArgumentTypeError(f"{text!r}: give ranks of a token, 0 to 64, such as 0,1,2,4")
    return values


def _policies(text: str) -> list[str]:
    values = _list(text)
    if not values or set(values) - set(POLICIES):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {','.join(POLICIES)}")
    return values


def _rate(text: str) -> float:
    """Bytes a second: 3.2e9, 3.2GB, 900MB."""
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
    number, unit = text.removesuffix("/s"), 1.0
    if number[-2:] in units:
        number, unit = number[:-2], units[number[-2:]]
    try:
        value = float(number) * unit
    except ValueError:
        value = 0.0
    if not 0 < value < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r}: give bytes a second, such as 3.2GB")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share below 1, such as 0.25")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of bytes")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace-simulate",
        description="Replay recorded routes through the cache of experts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="routes, one JSON object a line")
    parser.add_argument("--cache", metavar="SETS", type=_sets,
                        help="sizes in working sets (what one token uses; default 0.25,0.5,1,2,4)")
    parser.add_argument("--ram", metavar="SIZES", type=_list,
                        help="sizes as --ram of the engine, such as 4GiB,8GiB; needs --model")
    parser.add_argument("--policy", metavar="NAMES", type=_policies, default=["auto", "lru", "belady"],
                        help=f"of {','.join(POLICIES)} (default auto,lru,belady)")
    parser.add_argument("--warm-up", metavar="SHARE", type=_share, default=0.25,
                        help="of the tokens at the start that fill the cache uncounted (default 0.25)")
    parser.add_argument("--model", metavar="CONTAINER", type=Path,
                        help="the container: sizes of experts, and with --ram a forecast")
    parser.add_argument("--record-bytes", metavar="N", type=_count, default=0,
                        help="bytes of an expert, when neither trace nor container says")
    parser.add_argument("--bandwidth", metavar="RATE", type=_rate,
                        help="of the drive, such as 3.2GB: the tokens per second that it allows")
    parser.add_argument("--read-ahead", metavar="RANKS", type=_widths,
                        help="experts of the next layer read before they are known, such as 0,1,2,4,8")
    parser.add_argument("--compute", metavar="MS", type=float, default=0.0,
                        help="arithmetic of a token in milliseconds, for --read-ahead with --bandwidth")
    parser.add_argument("--seconds", metavar="S", type=float, default=2.0,
                        help="of measuring the drive for the forecast (default 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--version", action="version", version=f"headrace-simulate {__version__}")
    return parser


class _Forecaster:
    """Tokens per second with the misses of a simulation: by the machine, or by a given bandwidth."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.bandwidth, self.compute = args.bandwidth, args.compute / 1e3
        self.probe: headrace.Probe | None = None
        self.plans: dict[tuple[str | None, int | None], headrace.Plan] = {}
        if args.model is not None and args.ram is not None:
            for width in args.read_ahead or [None]:
                ahead = "auto" if width is None else width or "off"
                for ram in args.ram:
                    self.plans[ram, width] = plan = headrace.plan(args.model, ram=ram, read_ahead=ahead)
                    if not plan.fits:
                        raise headrace.HeadraceMemoryError(
                            f"--ram {ram}: below the floor of {args.model}, {plan.floor} bytes")
            if self.bandwidth is None:
                plan = next(iter(self.plans.values()))
                self.probe = headrace.probe(args.model, plan, disk_seconds=args.seconds)

    def __call__(self, ram: str | None, bytes_per_token: float | None,
                 misses: list[float]) -> tuple[float | None, str | None]:
        if self.probe is not None and ram is not None and misses:
            found = headrace.forecast(self.plans[ram, None], self.probe, misses=misses)
            return found.tokens_per_second, found.limit
        if self.bandwidth is not None and bytes_per_token:
            return self.bandwidth / bytes_per_token, "disk"
        return None, None

    def pace(self, trace: Trace, record: int, ram: str | None, width: int | None) -> headrace.Pace | None:
        """How long things take, when time is to be counted and can be."""
        if width is None or not record:
            return None
        plan = self.plans.get((ram, width))
        layers, top_k = trace.routes.shape[1:]
        if self.probe is not None and plan is not None:
            compute = headrace.forecast(plan, self.probe, misses=[1.0]).seconds_compute
            experts = plan.experts_per_token / self.probe.expert_rate
            drive = next((d for d in self.probe.disk if d.depth == self.probe.best_depth), None)
            if drive is None or drive.bytes_per_second <= 0:
                return None
            rate, depth = drive.bytes_per_second, max(2, drive.depth)
        elif self.bandwidth is not None:
            rate, depth, compute = self.bandwidth, 0, self.compute
            experts = 0.0
            if plan is not None:
                experts = compute * plan.experts_per_token / (plan.experts_per_token + plan.trunk_per_token)
        else:
            return None
        return headrace.Pace(record / rate, (compute - experts) / layers, experts / layers / top_k, depth)


def _record_bytes(trace: Trace, args: argparse.Namespace) -> int:
    """Of an expert; raises TraceError when the model's experts are not those of the trace."""
    if args.model is None:
        return args.record_bytes or trace.record_bytes
    plan = headrace.plan(args.model)
    trace.check_model(plan.moe_layers, plan.experts, plan.top_k)
    return args.record_bytes or plan.record_bytes


def _rows(trace: Trace, args: argparse.Namespace) -> list[Row]:
    record = _record_bytes(trace, args)
    forecaster = _Forecaster(args)
    warm_up = int(args.warm_up * trace.routes.shape[0])
    widths = args.read_ahead or [None]
    ranks = _ranks(trace, max(args.read_ahead or [0]))
    if args.ram is not None:
        sizes = [(ram, w, forecaster.plans[ram, w].cache_slots) for ram in args.ram for w in widths]
    else:
        sets = args.cache or [0.25, 0.5, 1.0, 2.0, 4.0]
        sizes = [(None, w, min(trace.total, int(s * trace.working_set))) for s in sets for w in widths]
    rows = []
    for policy in args.policy:
        for ram, width, slots in sizes:
            if policy == "belady" and width != widths[0]:
                continue
            extra: dict[str, float | None] = {}
            if policy == "belady":
                hits, misses = belady(trace.routes, slots, trace.experts, warm_up)
                tokens, read, shares, pace = trace.routes.shape[0] - warm_up, misses, [], None
            else:
                pace = forecaster.pace(trace, record, ram, width)
                found = headrace.simulate(trace.routes, slots, experts=trace.experts, policy=policy,
                                          warm_up=warm_up, guesses=trace.guesses,
                                          read_ahead=min(width or 0, ranks), pace=pace)
                hits, misses, tokens = found.hits, found.misses, found.tokens
                read, shares = misses + found.ahead_wasted, found.miss_shares
                if width is not None:
                    extra = _ahead(found, width, record, pace)
            volume = record * read / tokens if record else None
            if pace is not None and found.seconds > 0:
                rate: float | None = found.alone / found.seconds
                busy = found.seconds - found.seconds_blocked
                limit: str | None = "disk" if read * pace.read > busy else "compute"
            else:
                rate, limit = forecaster(ram, volume, shares) if width is None else (None, None)
            rows.append(Row(policy, slots, round(slots / trace.working_set, 4), ram, hits, misses,
                            tokens, hits / max(1, hits + misses), volume, rate, limit, **extra))
    return rows


def _ranks(trace: Trace, width: int) -> int:
    """Guessed ranks that the trace has; raises TraceError when `width` needs more. No more than a token
    uses are ever read ahead."""
    ranks = 0 if trace.guesses is None else trace.guesses.shape[2]
    if min(width, trace.routes.shape[2]) > ranks:
        raise TraceError(f"the trace has guesses of {ranks} ranks, and {width} are asked for: record it "
                         f"with headrace trace --read-ahead {width}")
    return ranks


def _ahead(found: headrace.Simulation, width: int, record: int,
           pace: headrace.Pace | None) -> dict[str, float | None]:
    size = record / found.tokens if record else None
    hidden = None
    if pace is not None and found.seconds_wanted > 0:
        hidden = max(0.0, 1 - found.seconds_blocked / found.seconds_wanted)
    return {"read_ahead": width, "ahead_issued": found.ahead_issued, "ahead_used": found.ahead_used,
            "ahead_wasted": found.ahead_wasted, "ahead_cancelled": found.ahead_cancelled,
            "useful_bytes_per_token": size and size * found.ahead_used,
            "wasted_bytes_per_token": size and size * found.ahead_wasted,
            "misses_left_per_token": (found.misses - found.ahead_used) / found.tokens,
            "hidden": hidden}


def _cells(row: Row) -> str:
    """What was read ahead, for a token."""
    if row.read_ahead is None:
        return ""
    used, vain = ("" if b is None else f"{b / 1e6:.1f}"
                  for b in (row.useful_bytes_per_token, row.wasted_bytes_per_token))
    hidden = "" if row.hidden is None else f"{row.hidden:.1%}"
    return f"{row.read_ahead:5} {used:>8} {vain:>8} {row.misses_left_per_token:11.2f} {hidden:>7}"


def _table(trace: Trace, rows: list[Row]) -> str:
    tokens, layers, top_k = trace.routes.shape
    lines = [f"{tokens} tokens, {layers} layers of {trace.experts} experts, {top_k} of a token "
             f"({trace.working_set} in all), {rows[0].tokens} tokens counted",
             f"{'policy':8} {'cache':>10} {'sets':>6} {'experts':>8} {'hits':>7} {'MB/token':>9} {'tokens/s':>9}"]
    if any(row.read_ahead is not None for row in rows):
        lines[1] += f" {'limit':7} {'ahead':>5} {'used MB':>8} {'vain MB':>8} {'misses left':>11} {'hidden':>7}"
    for row in rows:
        volume = "" if row.bytes_per_token is None else f"{row.bytes_per_token / 1e6:.1f}"
        rate = "" if row.tokens_per_second is None else f"{row.tokens_per_second:.2f}"
        lines.append(f"{row.policy:8} {row.ram or '':>10} {row.working_sets:6.2f} {row.slots:8} "
                     f"{row.hit_rate:7.1%} {volume:>9} {rate:>9} {row.limit or '':7} {_cells(row)}".rstrip())
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.ram is not None and (args.model is None or args.cache is not None):
        parser.error("--ram needs --model, and excludes --cache")
    try:
        trace = read_trace(args.trace)
        rows = _rows(trace, args)
    except TraceError as error:
        print(f"headrace-simulate: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except headrace.UsageError as error:
        print(f"headrace-simulate: {error}", file=sys.stderr)
        return EXIT_USAGE
    except headrace.HeadraceError as error:
        print(f"headrace-simulate: {error}", file=sys.stderr)
        codes = {headrace.HeadraceIOError: EXIT_IO, headrace.HeadraceMemoryError: EXIT_MEMORY}
        return codes.get(type(error), EXIT_BAD_INPUT)
    except OSError as error:
        print(f"headrace-simulate: {error.filename or args.trace}: {error.strerror}", file=sys.stderr)
        return EXIT_IO
    except KeyboardInterrupt:
        return 130
    if args.json:
        print(json.dumps({"trace": str(args.trace), "tokens": trace.routes.shape[0],
                          "layers": trace.routes.shape[1], "top_k": trace.routes.shape[2],
                          "experts": trace.experts, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(_table(trace, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
