"""headrace-synth OUT: a container of any geometry with random weights, for measuring speed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path

from ..convert.errors import EXIT_IO, EXIT_USAGE, ConvertError
from ..convert.options import EXPERT_CHOICES, RVQ_CODECS, TRUNK_CODECS, Options
from ..convert.preflight import Preflight
from ..convert.safetensors_source import read_json_object
from .geometry import layout
from .presets import PRESETS, cut
from .routing import topic_chain
from .writer import synthesise

_EPILOG = """Tokens: OUT/tokens.txt holds --tokens ids that stay with a topic for a while, as text does;
routing shows its locality with these, not with ids drawn at random. Without --preset and --geometry
OUT is a container made before, and --tokens ids (of --seed) are printed. docs/synth.md has the recipe.

exit codes: 0 ok, 2 usage, 3 bad geometry, 5 I/O (disk full), 130 interrupted."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace-synth",
        description="Write a container with random weights, straight at disk speed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="container directory to write")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", choices=sorted(PRESETS), help="a geometry known by name")
    source.add_argument("--geometry", metavar="FILE", type=Path, help="a config.json")
    parser.add_argument(
        "--experts", choices=(*(c for c in EXPERT_CHOICES if c != "auto"), "rvq4x64", "rvq2x256"),
        default="nl4", metavar="CODEC", help="codec of the routed experts (default nl4)",
    )
    parser.add_argument(
        "--activations", type=int, choices=(8, 22),
        help="bits of the activations that mxfp4 experts are multiplied with (default 8; "
        "headrace-convert takes 22 for experts that are MXFP4 in the source)",
    )
    parser.add_argument(
        "--trunk", choices=TRUNK_CODECS, default="int8", metavar="CODEC",
        help="codec of the other matrices (default int8)",
    )
    parser.add_argument("--layers", metavar="N", type=int, help="only the first N layers")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="default 0")
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=4096, help="ids in tokens.txt (default 4096)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a container in OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress, no summary")
    return parser


def _layout(args: argparse.Namespace) -> Preflight:
    if args.preset:
        config, name = PRESETS[args.preset](), args.preset
    else:
        config, name = read_json_object(args.geometry), args.geometry.stem
    if args.layers is not None:
        config, name = cut(config, args.layers), f"{name}-{args.layers}l"
    experts = {codec: alias for alias, codec in RVQ_CODECS.items()}.get(args.experts, args.experts)
    return layout(config, name, Options(
        experts=experts, trunk=args.trunk, tokenizer=False, activations=args.activations))


def _print_tokens(args: argparse.Namespace) -> None:
    manifest = read_json_object(args.out / "manifest.json")
    vocab = manifest["model"]["vocab_size"]  # type: ignore[index]
    print("\n".join(str(one) for one in islice(topic_chain(vocab, args.seed), args.tokens)))


def _write(args: argparse.Namespace) -> None:
    pre = _layout(args)
    total, begun, done, shown = pre.output_bytes(), time.perf_counter(), 0, 0.0

    def progress(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.perf_counter()
        if not args.quiet and sys.stderr.isatty() and now - shown > 0.5:
            shown = now
            print(f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB", end="", file=sys.stderr, flush=True)

    synthesise(pre, args.out, args.seed, args.tokens, args.overwrite, progress)
    seconds = time.perf_counter() - begun
    if not args.quiet:
        summary = {
            "container": str(args.out),
            "bytes": sum(pre.files().values()),
            "seconds": round(seconds, 2),
            "bytes_per_second": round(sum(pre.files().values()) / seconds),
            "parameters": pre.parameters,
        }
        print(json.dumps(summary))


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.layers is not None and args.layers < 1:
        parser.error("--layers must be at least 1")
    if args.activations and args.experts != "mxfp4":
        parser.error("--activations is for --experts mxfp4")
    if args.tokens < 0 or args.seed < 0:
        parser.error("--tokens and --seed must not be negative")
    try:
        if args.preset or args.geometry:
            _write(args)
        elif (args.out / "manifest.json").is_file():
            _print_tokens(args)
        else:
            print("headrace-synth: give --preset or --geometry", file=sys.stderr)
            return EXIT_USAGE
    except ConvertError as error:
        print(f"headrace-synth: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"headrace-synth: {error}", file=sys.stderr)
        return EXIT_IO
    except KeyboardInterrupt:
        print("headrace-synth: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
