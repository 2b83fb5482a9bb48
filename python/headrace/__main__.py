"""``python -m headrace run MODEL -p TEXT``: the wrapper's own small command.

The C command ``headrace`` does the same and more.
"""

from __future__ import annotations

import argparse
import sys

from . import HeadraceError, HeadraceIOError, HeadraceMemoryError, Model, UsageError, version


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headrace")
    parser.add_argument("--version", action="version", version=f"headrace {version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="generate text, streamed to standard output")
    run.add_argument("model", help="container directory")
    run.add_argument("-p", "--prompt", required=True)
    run.add_argument("--ram", default=None, help="ceiling on memory, such as 8GiB")
    run.add_argument("--threads", type=int, default=0)
    run.add_argument("--ctx", type=int, default=4096)
    run.add_argument("--isa", default="auto")
    run.add_argument("--chunk", type=int, default=0)
    run.add_argument("--no-direct", action="store_true", help="read through the page cache")
    run.add_argument("--max-tokens", type=int, default=256)
    run.add_argument("--temperature", type=float, default=0.0)
    run.add_argument("--top-k", type=int, default=0)
    run.add_argument("--top-p", type=float, default=1.0)
    run.add_argument("--min-p", type=float, default=0.0)
    run.add_argument("--seed", type=int, default=0)
    return parser


def _run(options: argparse.Namespace) -> None:
    with Model(options.model, ram=options.ram, threads=options.threads, ctx=options.ctx,
               isa=options.isa, chunk=options.chunk, direct=not options.no_direct) as model:
        stream = model.stream(options.prompt, max_tokens=options.max_tokens,
                              temperature=options.temperature, top_k=options.top_k,
                              top_p=options.top_p, min_p=options.min_p, seed=options.seed)
        for token in stream:
            sys.stdout.write(token.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        made = stream.generation
        assert made is not None
        stats = made.stats
        print(f"{len(made.ids)} tokens ({made.finish_reason}), {stats.seconds_decode:.2f} s, "
              f"cache hit rate {stats.hit_rate:.3f}, {stats.bytes_read} bytes read",
              file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, 2 usage, 3 bad file, 4 memory, 5 I/O, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except KeyboardInterrupt:
        return 130
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        if isinstance(error, UsageError):
            return 2
        if isinstance(error, HeadraceMemoryError):
            return 4
        return 5 if isinstance(error, HeadraceIOError) else 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
