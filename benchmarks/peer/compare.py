"""Headrace and the peer in turn on the same ids, each inside the same memory limit (A B A B).

    sudo python compare.py CONTAINER MODEL.gguf --ids IDS.txt --limit 4GiB --headrace ../../build/headrace

The limit is a memory control group (version 1 or 2), so that the peer's page cache counts as its
memory, as in a small machine. Before every run the page cache is dropped. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

UNIT = {"MiB": 2**20, "GiB": 2**30}


def size(text: str) -> int:
    return int(float(text[:-3]) * UNIT[text[-3:]])


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group that lets its processes have `limit` bytes, page cache included."""
    root = Path("/sys/fs/cgroup")
    old = (root / "memory").is_dir()
    group = (root / "memory" if old else root) / f"peer-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
    try:
        yield group / ("tasks" if old else "cgroup.procs")
    finally:
        group.rmdir()


def run(command: list[str], limit: int) -> str:
    """Standard output of a command under the limit, from a cold page cache."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    with memory_group(limit) as tasks:
        return subprocess.run(command, capture_output=True, text=True, check=True,
                              preexec_fn=lambda: tasks.write_text(str(os.getpid()))).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("container")
    parser.add_argument("gguf")
    parser.add_argument("--ids", required=True)
    parser.add_argument("--limit", type=size, default=size("4GiB"))
    parser.add_argument("--slack", type=size, default=size("96MiB"),
                        help="what the limit holds beside --ram: the process itself")
    parser.add_argument("--prefill", type=int, default=128)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--headrace", default="headrace")
    parser.add_argument("--peer", default="./decode")
    parser.add_argument("--option", action="append", default=[], help="further options of headrace bench")
    o = parser.parse_args()
    ours = [o.headrace, "bench", o.container, "--ids", o.ids, "--prefill", str(o.prefill), "--decode",
            str(o.decode), "--repeats", "1", "--cold", "--json", "--threads", str(o.threads),
            "--ram", f"{(o.limit - o.slack) >> 20}MiB", "--ctx", str(o.prefill + o.decode + 8),
            *o.option]
    theirs = [o.peer, o.gguf, o.ids, str(o.prefill), str(o.decode), str(o.threads), "mapped"]
    rows = []
    for _ in range(o.rounds):
        a = json.loads(run(ours, o.limit))
        b = [float(x) for x in re.findall(r"[0-9.]+", run(theirs, o.limit))]
        rows.append({"headrace": a, "peer": dict(zip(("prefill", "decode", "decode_mb"), b))})
        print(json.dumps(rows[-1]), flush=True)
    for phase in ("prefill", "decode"):
        ratios = [r["headrace"][phase]["tokens_per_second"] / r["peer"][phase] for r in rows]
        print(f"{phase}: {statistics.median(ratios):.2f} times the peer "
              f"({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
