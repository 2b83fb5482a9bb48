"""How near the engine is to what the drive and the arithmetic allow, on one machine.

    sudo python disk_bound.py CONTAINER --ids IDS.txt --ram 4GiB --headrace ../build/headrace

Every round is probe, cold run, probe: `headrace doctor` measures the drive at the record size,
`headrace bench --cold` evaluates the ids. A round whose two probes differ by more than --drift says
more about the drive than about the engine: it is printed and not counted. Prints

- reads: what the drive gave while decoding had reads in flight, as a share of the probe. (Prefill fills
  memory that nothing has touched yet, and waits for the system to clear it.)
- bound: decode seconds for a token over the larger of (missed bytes / probe) and compute seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess


def reported(command: list[str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{' '.join(command)}: {done.stderr or done.stdout}")
    return json.loads(done.stdout)


def probe(headrace: str, container: str, ram: str) -> float:
    """Bytes per second of the drive at its best number of reads in flight."""
    drive = reported([headrace, "doctor", container, "--ram", ram, "--json"])["drive"]
    return max(rate["bytes_per_second"] for rate in drive["rates"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("container")
    parser.add_argument("--ids", required=True)
    parser.add_argument("--ram", default="4GiB")
    parser.add_argument("--prefill", type=int, default=32)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drift", type=float, default=0.15)
    parser.add_argument("--headrace", default="headrace")
    parser.add_argument("--option", action="append", default=[], help="further options of headrace bench")
    o = parser.parse_args()
    bench = [o.headrace, "bench", o.container, "--ids", o.ids, "--prefill", str(o.prefill), "--decode",
             str(o.decode), "--repeats", "1", "--cold", "--json", "--ram", o.ram,
             "--ctx", str(o.prefill + o.decode), *o.option]
    reads, bounds = [], []
    before = probe(o.headrace, o.container, o.ram)
    for _ in range(o.rounds):
        run = reported(bench)
        after = probe(o.headrace, o.container, o.ram)
        rate = (before + after) / 2
        drift = abs(before - after) / rate
        d = run["decode"]
        share = d["bytes_per_second_reading"] / rate
        disk, compute = (x / d["tokens"] for x in (d["bytes_read"] / rate, d["seconds_compute"]))
        bound = d["seconds"] / d["tokens"] / max(disk, compute)
        if drift <= o.drift:
            reads.append(share)
            bounds.append(bound)
        print(f"probe {before / 1e9:.2f} to {after / 1e9:.2f} GB/s; reads {share:.1%} of it; a token "
              f"{1e3 * d['seconds'] / d['tokens']:.0f} ms, disk {1e3 * disk:.0f}, compute "
              f"{1e3 * compute:.0f}: {bound:.2f}{'' if drift <= o.drift else ' (not counted)'}", flush=True)
        before = after
    for name, values in (("reads", reads), ("bound", bounds)):
        if values:
            print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}) "
                  f"of {len(values)} rounds")


if __name__ == "__main__":
    main()
