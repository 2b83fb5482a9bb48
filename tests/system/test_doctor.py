"""`headrace doctor`, the probe behind it, and plans of containers that do not exist yet."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from case_helpers import slow_drive

ROOT = Path(__file__).resolve().parents[2]
TWO = ["--threads", "2"]  # what a budget of few megabytes leaves for experts, on any machine


def doctor(binary, *args, env=None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(binary), "doctor", *map(str, args)], capture_output=True, timeout=900,
                          env=env)


@pytest.fixture(scope="module")
def examined(headrace_bin, model_dir) -> dict:
    done = doctor(headrace_bin, model_dir, "--ram", "12MiB", *TWO, "--seconds", "0.3", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_plan_is_that_of_plan(examined, headrace, model_dir) -> None:
    plan = headrace.plan(model_dir, ram="12MiB", threads=2)
    for name in ("floor", "cache", "cache_slots", "record_bytes", "total"):
        assert examined["plan"][name] == getattr(plan, name)


def test_what_a_token_costs(headrace, model_dir) -> None:
    plan = headrace.plan(model_dir)
    manifest = json.loads((model_dir / "manifest.json").read_text())
    tensors = manifest["trunk"]["tensors"]
    held = sum(t["bytes"] for t in tensors)
    embed = next(t["bytes"] for t in tensors if t["name"] == "embed")
    assert plan.trunk_per_token == (held if manifest["model"]["head"] == "embed" else held - embed)
    top_k = [f["top_k"] for f in manifest["model"]["ffns"] if f["kind"] == "moe"][0]
    shared = [t["bytes"] for t in tensors if ".shared." in t["name"]]
    assert plan.shared_per_token == sum(shared)
    assert plan.experts_per_token == sum(top_k * b["record_bytes"] for b in manifest["experts"])
    assert (plan.trunk_codec, plan.expert_codec) == ("int8", "int8")
    assert (plan.layers, plan.moe_layers, plan.top_k) == (8, 8, 4)
    assert plan.state_per_token > 0 and plan.state_per_position > 0 and plan.has_tokenizer


def test_the_drive_and_the_processor_were_measured(examined) -> None:
    drive, compute = examined["drive"], examined["compute"]
    assert [r["depth"] for r in drive["rates"]] == [1, 2, 4, 8]
    assert drive["asked"] > 0 and drive["best_depth"] in (1, 2, 4, 8) and not drive["fresh"]
    if drive["physical"] is not None and drive["direct"]:
        assert drive["cold"] == (drive["physical"] >= 0.98 * drive["asked"])
    for rate in ("memory_rate", "expert_rate", "trunk_rate", "other_rate"):
        assert compute[rate] > 1e4
    assert 0 < compute["dispatch_seconds"] < 60


def test_forecast(examined) -> None:
    found = examined["forecast"]
    assert 0 < found["low"] < found["tokens_per_second"] < found["high"]
    assert 0 <= found["hit_low"] < found["hit_rate"] < found["hit_high"] <= 1
    assert found["bytes_read"] > 0
    assert found["levers"]["ram"] > found["tokens_per_second"]
    assert examined["verdict"] == "warn"
    assert any("one token needs 32" in reason["text"] for reason in examined["reasons"])


def test_a_second_drive_adds_its_bandwidth(headrace_bin, build_dir, model_dir, tmp_path) -> None:
    env = slow_drive(build_dir, 40e6)
    for bank in sorted(model_dir.glob("experts-*.bin"))[:4]:
        (tmp_path / bank.name).write_bytes(bank.read_bytes())
    rates = []
    for more in ([], ["--drive", tmp_path]):
        done = doctor(headrace_bin, model_dir, "--ram", "12MiB", *TWO, "--seconds", "0.3", "--json", *more,
                      env=env)
        assert done.returncode == 0, done.stderr
        rates.append(json.loads(done.stdout)["drive"]["rates"][-1]["bytes_per_second"])
    assert rates[0] == pytest.approx(40e6, rel=0.15)
    assert rates[1] == pytest.approx(60e6, rel=0.15), "it has half of the banks"


@pytest.fixture(scope="module")
def fine_model(tmp_path_factory, headrace) -> Path:
    """Experts that meet 22-bit activations."""
    from headrace_tools.synth import cli

    out = tmp_path_factory.mktemp("fine") / "model"
    config = ROOT / "tests" / "fixtures" / "qwen3_moe" / "config.json"
    assert cli.main([str(out), "--quiet", "--geometry", str(config), "--experts", "mxfp4",
                     "--activations", "22"]) == 0
    return out


def test_experts_are_measured_as_they_run(headrace_bin, headrace, fine_model) -> None:
    """22-bit activations: by the kernel that the container declares, and said."""
    done = doctor(headrace_bin, fine_model, "--ram", "64MiB", "--seconds", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compute"]["expert_activations"] == 22
    done = doctor(headrace_bin, fine_model, "--ram", "64MiB", "--seconds", "0.1")
    assert b"(mxfp4, 22-bit activations)" in done.stdout
    plan = headrace.plan(fine_model)
    assert (plan.expert_codec, plan.expert_activations) == ("mxfp4", 22)
    coarse = replace(plan, expert_activations=8)
    assert headrace.probe(None, coarse, disk_seconds=-1, compute_seconds=0.1).expert_activations == 8
    probe = headrace.probe(None, plan, disk_seconds=-1, compute_seconds=0.1)
    assert probe.expert_activations == 22 and probe.expert_rate > 1e4


def test_bench_names_the_activations(headrace_bin, fine_model) -> None:
    args = [str(headrace_bin), "bench", str(fine_model), "--prefill", "4", "--decode", "4"]
    found = json.loads(subprocess.run([*args, "--json"], capture_output=True, check=True).stdout)
    assert (found["model"]["expert_codec"], found["model"]["expert_activations"]) == ("mxfp4", 22)
    text = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    assert "experts mxfp4, 22-bit activations," in text


@pytest.mark.parametrize("fine", [False, True])
def test_throughput_calls_the_kernel_of_the_bank(lib, fine) -> None:
    """Only it, whatever the other one would do."""
    ffi, c = lib
    kernels = ffi.new("struct kernels *", c.kernels_find(b"reference")[0])
    called = set()
    names = {False: "mxfp4_panels", True: "mxfp4_panels22"}
    kept = []
    for name in names.values():
        kept.append(ffi.callback(ffi.typeof(getattr(kernels, name)),
                                 lambda *_, name=name: called.add(name) and None))
        setattr(kernels, name, kept[-1])
    setup = ffi.new("struct throughput_setup *", {
        "k": kernels, "threads": 1, "seconds": 0.05, "pool": 1 << 20, "fine": fine,
        "expert_codec": c.codec_from_name(b"mxfp4"), "width": 64, "inner": 64, "experts": 2})
    found, err = ffi.new("struct throughput *"), ffi.new("hr_error *")
    assert c.throughput_measure(setup, ffi.NULL, found, err) == 0, ffi.string(err.detail)
    assert called == {names[fine]} and found.experts > 0


def test_for_people(headrace_bin, model_dir) -> None:
    done = doctor(headrace_bin, model_dir, "--ram", "64MiB", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert text.startswith("verdict") and "forecast" in text and "tokens/s" in text
    assert "256 of 256 experts" in text and "the limit is" in text


def test_too_little_memory(headrace_bin, model_dir) -> None:
    done = doctor(headrace_bin, model_dir, "--ram", "1MiB", "--seconds", "0.1", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 4 and found["verdict"] == "no"
    assert found["reasons"][0]["grade"] == "no" and "floor" in found["reasons"][0]["text"]


def test_a_container_without_experts_needs_no_drive(headrace_bin, tmp_path) -> None:
    from containers import make_container

    model = make_container(tmp_path / "model", layers=1, dense=(0,), tokenizer=None)
    done = doctor(headrace_bin, model["path"], "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["drive"]["rates"] == [] and found["forecast"]["bytes_read"] == 0
    assert any("no tokenizer" in reason["text"] for reason in found["reasons"])


@pytest.mark.parametrize("args, code", [
    ([], 2), (["--seconds", "0"], 2), (["--seconds", "61"], 2), (["--isa", "avx1"], 2)])
def test_usage(headrace_bin, model_dir, args: list[str], code: int) -> None:
    done = doctor(headrace_bin, *([model_dir] if args else []), *args)
    assert done.returncode == code and done.stdout == b""


def test_no_such_container(headrace_bin, tmp_path) -> None:
    done = doctor(headrace_bin, tmp_path / "absent")
    assert done.returncode == 5 and b"absent" in done.stderr


# ---- hits of one's own text -------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(headrace_bin, model_dir, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    text = ROOT / "models" / "val.txt"
    subprocess.run([str(headrace_bin), "trace", str(model_dir), "-f", str(text), "--tokens", "200",
                    "-o", str(path)], check=True, capture_output=True, timeout=900)
    return path


def test_hits_of_a_trace(headrace, headrace_bin, model_dir, trace) -> None:
    from headrace_tools.simulate.trace import read_trace

    done = doctor(headrace_bin, model_dir, "--ram", "13MiB", *TWO, "--seconds", "0.1", "--trace", trace,
                  "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["forecast"]
    recorded = read_trace(trace)
    slots = headrace.plan(model_dir, ram="13MiB", threads=2).cache_slots
    simulated = headrace.simulate(recorded.routes, slots, experts=recorded.experts, warm_up=50)
    assert found["hits_from"] == "trace" and 0.05 < found["hit_rate"] < 0.95
    assert found["hit_rate"] == pytest.approx(simulated.hit_rate)


@pytest.mark.parametrize("lines, text", [
    ("", "no token"), ('{"layers": [[1, 2, 3, 4]]}\n', "line 1 is no token of this model"),
    ('{"layers": ' + json.dumps([[1, 2, 3, 4, 5]] * 8) + "}", "line 1"),
    ('{"layers": ' + json.dumps([[1, 2, 3, 99]] * 8) + "}", "expert 99"),
    ('{"layers": ' + json.dumps([1] * 8) + "}", "line 1"), ("[[[[", "line 1"),
    ('{"headrace": {"format": 3}}\n', "line 1: a format of routes")])
def test_traces_of_something_else(headrace_bin, model_dir, tmp_path, lines: str, text: str) -> None:
    (tmp_path / "trace").write_text(lines)
    done = doctor(headrace_bin, model_dir, "--trace", tmp_path / "trace")
    assert done.returncode == 3 and text in done.stderr.decode()


@pytest.mark.plain_build
@pytest.mark.parametrize("rate", [30e6, 10e6])
def test_forecast_of_a_slow_drive(headrace, headrace_bin, build_dir, model_dir, trace, tmp_path,
                                  rate: float) -> None:
    """A drive of 30 MB/s, and one of a third of that: 25 % around what the engine then does with the part of
    the text that the trace's hits are counted in."""
    env = slow_drive(build_dir, rate)
    done = doctor(headrace_bin, model_dir, "--ram", "13MiB", *TWO, "--seconds", "1", "--trace", trace,
                  "--json", env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["drive"]["rates"][-1]["bytes_per_second"] == pytest.approx(rate, rel=0.1)
    text = (ROOT / "models" / "val.txt").read_text()[:4000]
    with headrace.Model(model_dir, ram="64MiB") as model:
        (tmp_path / "ids").write_text(" ".join(map(str, model.tokenize(text, special=True)[:200])))
    bench = subprocess.run(
        [str(headrace_bin), "bench", str(model_dir), "--ram", "13MiB", *TWO, "--ids", str(tmp_path / "ids"),
         "--prefill", "50", "--decode", "120", "--repeats", "1", "--cold", "--json"],
        capture_output=True, timeout=900, env=env, check=True)
    measured = json.loads(bench.stdout)["decode"]["tokens_per_second"]
    assert found["forecast"]["limit"] == "disk"
    assert measured == pytest.approx(found["forecast"]["tokens_per_second"], rel=0.25)


# ---- the probe ------------------------------------------------------------------------------------


def test_probe_of_a_directory_leaves_nothing(headrace, tmp_path) -> None:
    found = headrace.probe(tmp_path, disk_seconds=0.1, record_bytes=65536)
    assert found.fresh and found.asked > 0 and list(tmp_path.iterdir()) == []
    assert found.memory_rate == 0 and found.physical_memory > 0


def test_probe_of_a_file_and_a_link_to_it(headrace, tmp_path) -> None:
    (tmp_path / "shard").write_bytes(bytes(range(256)) * 1024)
    (tmp_path / "link").symlink_to("shard")
    for name in ("shard", "link"):
        found = headrace.probe(tmp_path / name, disk_seconds=0.1, record_bytes=4096)
        assert not found.fresh and 0 < found.asked <= 256 * 1024


def test_probe_without_a_drive(headrace, model_dir) -> None:
    plan = headrace.plan(model_dir)
    found = headrace.probe(None, plan, compute_seconds=0.1)
    assert found.disk == () and found.expert_rate > 0 and found.other_rate == 0


@pytest.mark.parametrize("changes, text", [
    ({"record_bytes": 1000}, "record_bytes"), ({"disk_seconds": 100.0}, "disk_seconds"),
    ({"disk_seconds": float("nan")}, "disk_seconds"), ({"threads": 5000}, "threads"),
    ({"expert_codec": "int9"}, "int9"), ({"isa": "none", "compute_seconds": 0.1}, "isa"),
    ({"expert_codec": "int8", "compute_seconds": 0.1}, "experts of"), ({"frobs": 1}, "frobs"),
    ({"expert_activations": 22}, "with mxfp4 also 22"), ({"expert_activations": 15}, "is 15")])
def test_probe_refuses(headrace, tmp_path, changes: dict, text: str) -> None:
    with pytest.raises(headrace.UsageError, match=text):
        headrace.probe(tmp_path, **changes)


# ---- containers to be -----------------------------------------------------------------------------


def test_a_manifest_plans_like_its_container(headrace, model_dir) -> None:
    manifest = (model_dir / "manifest.json").read_bytes()
    for ram in ("1MiB", "12MiB", "64MiB"):
        planned = headrace.plan_manifest(manifest, ram=ram)
        there = headrace.plan(model_dir, ram=ram)
        planned, there = (replace(p, available=0, recommended=0) for p in (planned, there))
        assert planned == there, "but for what else the machine does"


def test_a_manifest_that_is_none(headrace) -> None:
    with pytest.raises(headrace.FormatError):
        headrace.plan_manifest(b"{}")
