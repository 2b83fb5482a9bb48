"""arm64: cross-compiled, run under user emulation, the same bits as here (docs/determinism.md)."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from pathlib import Path

import pytest

from support.build import ROOT
from support.platforms import COVERING, compiled, logits_hash, need, run

need(["aarch64-linux-gnu-gcc", "qemu-aarch64"],
     "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user")

CROSS = ROOT / "cross" / "aarch64-linux.ini"
EMULATOR = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
# One with the dot-product instructions, one without.
CPUS = {"max": "neon-dotprod", "cortex-a53": "neon"}


@pytest.fixture(scope="module")
def built(build_dir: Path) -> Path:
    """A build directory that holds the arm64 `headrace` and libheadrace.a."""
    return compiled(build_dir / "aarch64", ["--cross-file", str(CROSS), "-Dtests=false"],
                    "headrace:executable", "headrace:static_library")


def test_it_is_an_arm64_program(built):
    header = (built / "headrace").read_bytes()[:20]
    assert header[:6] == b"\x7fELF\x02\x01" and int.from_bytes(header[18:20], "little") == 183


@pytest.mark.parametrize("cpu", CPUS)
def test_info_names_the_kernels(cpu, built, scored):
    path = scored["olmoe"].path
    out = json.loads(run([*EMULATOR, "-cpu", cpu, built / "headrace", "info", path, "--json"]))
    assert out["isa"][0] == CPUS[cpu] and out["isa"][-1] == "reference"
    assert out["model"]["isa"] == CPUS[cpu]
    for name in out["isa"]:
        out = json.loads(run([*EMULATOR, "-cpu", cpu, built / "headrace", "info", path, "--json", "--isa", name]))
        assert out["model"]["isa"] == name


@pytest.mark.parametrize("name", [row[0] for row in COVERING])
def test_same_logits(name, built, scored):
    one = scored[name]
    for cpu in CPUS:
        found = logits_hash([*EMULATOR, "-cpu", cpu, built / "headrace"], one.path, one.ids)
        assert found == one.sha256, f"{platform.machine()} and arm64 ({cpu}) differ"


def test_text_of_the_bundled_model(built, headrace_bin, model_dir, text_file):
    """Tokenizer, sampler and the trained model: the words and the loss, on both machines."""
    score = ["score", model_dir, "-f", text_file, "--hash", "--json", "--ctx", "128", "--window", "64"]
    say = ["run", model_dir, "-p", "The captain", "-n", "12", "--temperature", "0.8", "--seed", "5",
           "--ctx", "128"]
    here, there = [headrace_bin], [*EMULATOR, built / "headrace"]
    keys = ("logits_sha256", "perplexity", "predictions")
    losses = [json.loads(run([*program, *score])) for program in (here, there)]
    assert [losses[0][k] for k in keys] == [losses[1][k] for k in keys]
    assert run([*here, *say]) == run([*there, *say])


def test_every_kernel_hashes_alike(built, build_dir, tmp_path):
    """tests/unit/kernel_hash.c: wild inputs through every kernel of every table."""
    source = ROOT / "tests" / "unit" / "kernel_hash.c"
    lines = []
    for compiler, directory, runner in (("cc", build_dir, []),
                                        ("aarch64-linux-gnu-gcc", built, EMULATOR)):
        program = tmp_path / compiler
        subprocess.run([compiler, "-std=gnu11", "-O1", "-I", ROOT / "engine", "-I", ROOT / "include",
                        source, directory / "libheadrace.a", "-o", program, "-lm", "-pthread"],
                       check=True)
        lines += re.findall(r"^(\S+) ([0-9a-f]+)$", run([*runner, program, "8"]), re.MULTILINE)
    assert {"reference", "neon", "neon-dotprod"} <= {isa for isa, _ in lines}
    assert len({digest for _, digest in lines}) == 1, lines
