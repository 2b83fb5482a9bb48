"""Fuzzes the converter with hostile checkpoints.

python tests/fuzz/fuzz_converter.py BUILD [libFuzzer options] CORPUS...

BUILD is a meson build directory: the engine checks what is converted. An input is a script of
checkpoint_script.py. With atheris (pip install atheris) the search is guided by coverage; without it
inputs of the corpora are changed at random. Options of libFuzzer that are not understood are ignored.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tools", "python", "tests", "tests/fuzz"):
    sys.path.insert(0, str(ROOT / folder))

try:
    import atheris
except ImportError:
    atheris = None
with atheris.instrument_imports(include=["headrace_tools"]) if atheris else contextlib.nullcontext():
    import checkpoint_script
    from headrace_tools.convert import cli  # noqa: F401
import headrace  # noqa: E402
from support.build import shared_library  # noqa: E402
from support.processes import bound_address_space  # noqa: E402

ADDRESS_SPACE = 4 << 30
"""Bytes: an allocation that believes a hostile number fails, and is a finding."""


def changed(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(out))
        match rng.randrange(4):
            case 0:
                out[at:at] = rng.randbytes(rng.randint(1, 8))
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                del out[at : at + rng.randint(1, 4)]
            case _ if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
    return bytes(out)


def at_random(one, arguments: list[str]) -> None:
    """Without guidance: what atheris.Fuzz does, as far as it can be done."""
    seconds = next((float(a.split("=")[1]) for a in arguments if a.startswith("-max_total_time=")), 60)
    prefix = next((a.split("=")[1] for a in arguments if a.startswith("-artifact_prefix=")), "")
    folders = [Path(a) for a in arguments if not a.startswith("-")]
    seeds = [f.read_bytes() for folder in folders if folder.is_dir() for f in sorted(folder.iterdir())] or [b""]
    rng, end = random.Random(time.time_ns()), time.monotonic() + seconds
    for data in seeds:
        one(data)
    while time.monotonic() < end:
        data = changed(rng.choice(seeds), rng)
        try:
            one(data)
        except BaseException:
            Path(f"{prefix}crash").write_bytes(data)
            raise


def main() -> None:
    headrace.use_library(shared_library(Path(sys.argv.pop(1)).resolve(), "headrace"))
    counts = {"refused": 0, "converted": 0}
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-", dir=base) as directory:
        work = Path(directory) / "work"

        def one(data: bytes) -> None:
            code = checkpoint_script.run(data, work)
            counts["refused" if code else "converted"] += 1
            total = sum(counts.values())
            if total % 100 == 0:
                print(f"converter: {total} executions, {counts['converted']} converted", file=sys.stderr, flush=True)

        bound_address_space(ADDRESS_SPACE)
        if atheris is None:
            at_random(one, sys.argv[1:])
            return
        arguments = [a for a in sys.argv if not a.startswith(("--", "-rss_limit_mb"))]
        atheris.Setup(arguments, one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
