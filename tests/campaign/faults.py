#!/usr/bin/env python3
"""The fault tests of CI on more containers and for as long as one likes.

    .venv/bin/python tests/campaign/faults.py --build-dir build --minutes 60 [--tsan-dir build/tsan]

Every call of conversions with a tokenizer, with an n-gram table and with codebooks; every call and
allocation of the engine on a container of each family and of both bundled checkpoints; then, until
the time is over, sessions beside each other with ten thousand cancels and another seed each round.
Prints what was done as JSON; exit 1 when there was a problem.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests", "tools", "python"):
    sys.path.insert(0, str(ROOT / folder))

from conftest import CHECKPOINT, FIXTURES, convert  # noqa: E402
from containers import make_container  # noqa: E402
from support.build import shared_library  # noqa: E402
from support.injection import run_driver  # noqa: E402
from tiny_checkpoint import text_config, write_checkpoint  # noqa: E402

ENGINE_FIXTURES = ("qwen3_5_moe_eps", "qwen4_exp", "deepseek_v3", "gpt_oss", "kimi_linear", "mixtral")


def convert_sources(work: Path) -> list[tuple[Path, str]]:
    """(checkpoint, options) of the conversions."""
    # The bundled tokenizer without its merges: the whole takes a second each time.
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    single = [token for token in tokenizer["model"]["vocab"] if len(token) == 1]
    tokenizer["model"].update(vocab={token: i for i, token in enumerate(single)}, merges=[])
    for i, token in enumerate(tokenizer["added_tokens"]):
        token["id"] = len(single) + i
    vocab = len(single) + len(tokenizer["added_tokens"])
    with_tokenizer = write_checkpoint(work / "with_tokenizer", text_config(vocab_size=vocab), shards=3)
    (with_tokenizer / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(CHECKPOINT / "tokenizer_config.json", with_tokenizer)
    plain = write_checkpoint(work / "plain", shards=2)
    return [(with_tokenizer, "--trunk,bf16"), (FIXTURES / "qwen4_exp", "--no-tokenizer,--experts,bf16"),
            (plain, "--no-tokenizer,--experts,rvq2,--effort,greedy")]


def engine_containers(work: Path) -> list[Path]:
    small = work / "small"
    make_container(small, layers=3, experts=8, hidden=64, inner=32, codec="int8", tokenizer=None)
    out = [small]
    for name in ENGINE_FIXTURES:
        out.append(convert(FIXTURES / name, work / name, "--no-tokenizer", "--experts", "bf16",
                           "--trunk", "bf16"))
    out.append(convert(write_checkpoint(work / "rvq_source"), work / "rvq", "--no-tokenizer",
                       "--experts", "rvq2", "--effort", "greedy"))
    return out


class Campaign:
    def __init__(self, build_dir: Path, work: Path) -> None:
        self.build_dir, self.work = build_dir, work
        self.counts = {"conversion points": 0, "engine points": 0, "engine faults": 0, "cancels": 0,
                       "generations beside them": 0}
        self.problems: list[str] = []

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def conversions(self) -> None:
        for source, options in convert_sources(self.work):
            place = self.work / f"convert-{source.name}"
            place.mkdir()
            for result in run_driver(self.build_dir, "convert_driver", source, place, options):
                self.counts["conversion points"] += result["points"]
                self.problems += [f"{source.name}: {result['name']}: {p}" for p in result["problems"]]
                self.say(f"{source.name}: {result['name']}: {result['points']} points")

    def engine(self, containers: list[Path]) -> None:
        program = self.build_dir / "tests" / "faults" / "engine_loop"
        for container in containers:
            place = self.work / f"engine-{container.name}"
            (place / "mirror").mkdir(parents=True)
            for bank in container.glob("experts-*.bin"):
                shutil.copy(bank, place / "mirror")
            done = subprocess.run([program, container, place], capture_output=True, text=True)
            if done.returncode:
                self.problems.append(f"{container.name}: {done.stderr}")
            for result in map(json.loads, done.stdout.splitlines()):
                self.counts["engine points"] += result["points"]
                self.counts["engine faults"] += result["faults"]
                self.problems += [f"{container.name}: {result['name']}: {p}"
                                  for p in result["problems"]]
                self.say(f"{container.name}: {result['name']}: {result['points']} points")

    def sessions(self, containers: list[Path], until: float, builds: list[Path]) -> None:
        seed = 0
        while seed == 0 or time.monotonic() < until:
            seed += 1
            for build in builds:
                for container in containers:
                    cancels = 10000 if build == self.build_dir else 500
                    done = subprocess.run(
                        [build / "tests" / "unit" / "tsan_sessions", container, self.work,
                         str(cancels), str(seed)], capture_output=True, text=True,
                        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"})
                    words = done.stdout.replace(",", "").split()
                    if done.returncode:
                        self.problems.append(f"{container.name}, seed {seed}: {done.stderr[-3000:]}")
                    if len(words) > 4:
                        self.counts["cancels"] += int(words[0])
                        self.counts["generations beside them"] += int(words[2])
            self.say(f"round {seed}: {self.counts['cancels']} cancels")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build")
    parser.add_argument("--tsan-dir", type=Path, help="a build with -Db_sanitize=thread")
    parser.add_argument("--minutes", type=float, default=60, help="of the sessions; the rest takes its time")
    args = parser.parse_args()
    build_dir = args.build_dir.resolve()
    os.environ["HEADRACE_TEST_LIBRARY"] = str(shared_library(build_dir, "headrace"))
    shm = Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="headrace-", dir=shm if shm.is_dir() else None))
    begun = time.time()
    try:
        campaign = Campaign(build_dir, work)
        campaign.conversions()
        containers = engine_containers(work)
        campaign.engine(containers)
        builds = [build_dir] + ([args.tsan_dir.resolve()] if args.tsan_dir else [])
        campaign.sessions(containers, time.monotonic() + 60 * args.minutes, builds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True,
                            text=True).stdout.strip()
    print(json.dumps({"date": time.strftime("%Y-%m-%d", time.gmtime(begun)), "commit": commit,
                      "minutes": round((time.time() - begun) / 60, 1), **campaign.counts,
                      "problems": campaign.problems}, indent=1))
    return 1 if campaign.problems else 0


if __name__ == "__main__":
    sys.exit(main())
