"""x86-64 CPUs from the baseline to AVX2, emulated: never an illegal instruction, the same bits."""

from __future__ import annotations

import json
import platform

import pytest

from support.platforms import COVERING, emulator_works, logits_hash, need, run

if platform.machine() != "x86_64":
    pytest.skip("needs an x86-64 build: this machine is another", allow_module_level=True)
need(["qemu-x86_64"], "qemu-user")

# An instruction that the named CPU lacks ends the emulated program with SIGILL.
CPUS = {
    "qemu64": "reference",  # the baseline: SSE2 and little else
    "Nehalem": "reference",  # SSE4.2 with its crc32
    "SandyBridge": "reference",  # AVX without AVX2: wide registers alone are not enough
    "Haswell": "avx2",
}


@pytest.fixture(params=CPUS)
def cpu(request) -> str:
    if not emulator_works(["qemu-x86_64", "-cpu", request.param, "/bin/true"]):
        pytest.skip(f"this qemu-x86_64 cannot emulate {request.param}")
    return request.param


def test_info_names_the_kernels(cpu, headrace_bin, scored):
    path = scored["olmoe"].path
    out = json.loads(run(["qemu-x86_64", "-cpu", cpu, headrace_bin, "info", path, "--json"]))
    assert out["isa"] == list(dict.fromkeys([CPUS[cpu], "reference"]))
    assert out["model"]["isa"] == CPUS[cpu]
    shown = run(["qemu-x86_64", "-cpu", cpu, headrace_bin, "info", path])
    assert f"kernels         {CPUS[cpu]}," in shown


def test_same_logits(cpu, headrace_bin, scored):
    """All containers on the first and the last; those between run the kernels of the first."""
    chosen = COVERING if cpu in ("qemu64", "Haswell") else COVERING[:2]
    for name, _, _ in chosen:
        one = scored[name]
        found = logits_hash(["qemu-x86_64", "-cpu", cpu, headrace_bin], one.path, one.ids)
        assert found == one.sha256, f"{name} on {cpu}"


def test_every_kernel_set_of_this_machine(headrace_bin, scored):
    isas = json.loads(run([headrace_bin, "info", "--json"]))["isa"]
    for name, _, _ in COVERING:
        one = scored[name]
        for isa in isas:
            assert logits_hash([headrace_bin], one.path, one.ids, "--isa", isa) == one.sha256, isa


def test_verify_and_generate(cpu, headrace_bin, model_dir):
    """Checksums, the tokenizer and the sampler have code of their own for newer CPUs."""
    emulated = ["qemu-x86_64", "-cpu", cpu, headrace_bin]
    say = ["run", model_dir, "-p", "The captain", "-n", "6", "--ctx", "64"]
    assert run([*emulated, *say]) == run([headrace_bin, *say])
    run([*emulated, "verify", model_dir])
