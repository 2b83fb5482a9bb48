"""`headrace bench`: what it measures is all there and consistent."""

from __future__ import annotations

import itertools
import json
import subprocess

import pytest
from store_tools import clock

TOKENS = [1, 4, 16, 64]
SMALL = ["--rows", "128", "--cols", "256", "--pool", "2MiB"]


def bench(binary, *args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(binary), "bench", *args], capture_output=True, timeout=900)


def codecs(lib) -> list[str]:
    """Every codec of weights that this build has."""
    ffi, C = lib
    found = []
    for number in range(1, 1000):
        name = ffi.string(C.codec_name(number)).decode()
        if name == "none":
            return [n for n in found if n != "f64"]
        found.append(name)
    raise AssertionError("codec_name never says none")


@pytest.fixture(scope="module")
def table(headrace_bin) -> dict:
    done = bench(headrace_bin, "--kernels", "--seconds", "0.5", *SMALL, "--json")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return json.loads(done.stdout)


def rows(table: dict, kind: str) -> list[dict]:
    return [row for row in table["kernels"] if row["kind"] == kind]


def test_facts_of_the_run(table, headrace):
    assert table["version"] == headrace.version()
    assert table["rows"] == 128 and table["cols"] == 256
    assert table["pool_bytes"] == 2 << 20 < table["memory_bytes"] < 8 << 20
    assert table["cache_bytes"] >= 64 << 10


def test_every_codec_and_token_count_is_there(table, lib):
    found = [(row["name"], row["tokens"]) for row in rows(table, "codec")]
    names = codecs(lib)
    names.insert(names.index("mxfp4") + 1, "mxfp4-22")  # with 22-bit activations
    assert found == [(name, tokens) for name in names for tokens in TOKENS]


def test_every_operation_is_there(table):
    found = [(row["name"], row["tokens"]) for row in rows(table, "operation")]
    assert found == [("head", t) for t in TOKENS] + [
        (name, 1) for name in ("attention", "delta", "quantize", "quantize15", "quantize22")]


def test_the_two_yardsticks_come_last(table):
    assert [row["kind"] for row in table["kernels"][-2:]] == ["read", "peak"]
    read, peak = table["kernels"][-2:]
    measured = len(table["kernels"]) - 2
    assert read["repeats"] == peak["repeats"] == measured * table["kernels"][0]["repeats"]
    assert read["bytes_per_second"] > 1e6 and read["read_ratio"] == 1
    assert peak["macs_per_second"] > 1e6 and peak["peak_ratio"] == 1


def test_rates_of_products_fit_together(table, lib):
    ffi, C = lib
    size = ffi.new("size_t *")
    products = rows(table, "codec") + [r for r in table["kernels"] if r["name"] == "head"]
    for row in products:
        name = "int8" if row["name"] == "head" else row["name"].removesuffix("-22")
        assert C.codec_matrix_bytes(C.codec_from_name(name.encode()), 128, 256, size)
        assert row["macs_per_second"] == pytest.approx(row["weights_per_second"] * row["tokens"])
        assert row["bytes_per_second"] == pytest.approx(
            row["weights_per_second"] * size[0] / (128 * 256))


def test_ratios_are_positive_and_spreads_consistent(table):
    peak = table["kernels"][-1]["macs_per_second"]
    for row in rows(table, "codec") + rows(table, "operation"):
        assert row["repeats"] >= 5 and row["seconds"] > 0
        assert row["read_ratio"] > 0 and row["bytes_per_second"] > 0
        assert row["spread"] >= 0 and row["read_spread"] >= 0 and row["peak_spread"] >= 0
        assert (row["peak_ratio"] > 0) == (row["macs_per_second"] > 0)
        if row["name"].startswith("quantize"):
            assert row["macs_per_second"] == row["weights_per_second"] == row["peak_spread"] == 0
        else:  # the median of the ratios is near the ratio of the medians
            assert 0.01 < row["peak_ratio"] / (row["macs_per_second"] / peak) < 100


@pytest.mark.parametrize("seconds", [0.2, 1.0])
def test_seconds_are_respected(lib, seconds):
    """At least what was asked for and, where it is mostly others that run, little more than four times
    that. Each look at the clock takes a tick here, whatever the machine does."""
    ffi, C = lib
    params, error = ffi.new("hr_bench_params *"), ffi.new("hr_error *")
    C.hr_bench_params_init(params)
    params.seconds, params.rows, params.cols, params.pool = seconds, 64, 64, 1 << 20
    spent, ticks = [], itertools.count()

    @ffi.callback("hr_bench_fn")
    def on_row(_user, row):
        spent.append(row.seconds)
        return 0

    with clock(lib, lambda: next(ticks) * 5e-5):
        assert C.hr_bench_kernels(params, on_row, ffi.NULL, error) == C.HR_OK
    assert len(spent) > 20 and seconds <= sum(spent) < 5 * seconds


def test_text_table(headrace_bin):
    done = bench(headrace_bin, "--kernels", "--seconds", "0.1", "--isa", "reference", *SMALL)
    assert done.returncode == 0 and done.stderr == b""
    lines = done.stdout.decode().splitlines()
    assert lines[0].startswith("kernels reference, one thread; matrices [128, 256], pool 2.00 MiB")
    names = [line.split()[0] for line in lines[4:]]
    assert names.count("int8") == names.count("head") == 4 and names[-2:] == ["read", "dot"]


@pytest.mark.parametrize("args", [
    [], ["--json"], ["A", "B"], ["MODEL", "--repeats", "0"], ["MODEL", "--repeats", "101"],
    ["MODEL", "--prefill", "1"], ["MODEL", "--prefill", "0", "--decode", "0"],
    ["MODEL", "--ctx", "10"], ["MODEL", "--seconds", "1"], ["--kernels", "MODEL"], ["--kernels", "--isa", "sse"],
    ["--kernels", "--isa", ""], ["--kernels", "--isa", "a-name-longer-than-the-field"],
    ["--kernels", "--seconds", "0"], ["--kernels", "--seconds", "-1"],
    ["--kernels", "--seconds", "1e9"], ["--kernels", "--seconds", "soon"],
    ["--kernels", "--rows", "65537"], ["--kernels", "--cols", "65537"],
    ["--kernels", "--rows", "65536", "--cols", "65536"], ["--kernels", "--pool", "1"],
    ["--kernels", "--pool", "4MiB"], ["--kernels", "--ram", "1GiB"],
], ids=lambda args: " ".join(args) or "nothing")
def test_usage_errors_exit_2(headrace_bin, args):
    done = bench(headrace_bin, *args)
    assert done.returncode == 2
    assert done.stderr.startswith(b"headrace: ")
    if "--json" not in args:
        assert done.stdout == b""


def test_unknown_isa_is_named(headrace_bin):
    done = bench(headrace_bin, "--kernels", "--isa", "sse", "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "usage" and '"sse"' in error["detail"]


def test_a_pool_beyond_memory_is_refused(headrace_bin):
    done = bench(headrace_bin, "--kernels", "--pool", "4096TiB", "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["error"]["code"] == "memory"


def test_callback_stops_it(lib):
    ffi, C = lib
    params, error = ffi.new("hr_bench_params *"), ffi.new("hr_error *")
    C.hr_bench_params_init(params)
    params.seconds, params.rows, params.cols, params.pool = 0.1, 64, 64, 1 << 20
    seen = []

    @ffi.callback("hr_bench_fn")
    def on_row(_user, row):
        seen.append((ffi.string(row.name), row.size))
        return len(seen) == 3

    assert C.hr_bench_kernels(params, on_row, ffi.NULL, error) == C.HR_ERR_CANCELLED
    assert [name for name, _ in seen] == [b"f32"] * 3
    assert {size for _, size in seen} == {ffi.sizeof("hr_bench_row")}


def test_params_size_is_checked_and_may_be_shorter(lib):
    ffi, C = lib
    params, error = ffi.new("hr_bench_params *"), ffi.new("hr_error *")
    C.hr_bench_params_init(params)
    params.size = 0
    assert C.hr_bench_kernels(params, ffi.NULL, ffi.NULL, error) == C.HR_ERR_USAGE
    assert b"hr_bench_params_init" in ffi.string(error.detail)
    params.size = ffi.offsetof("hr_bench_params", "seconds")
    params.isa = b"none"
    assert C.hr_bench_kernels(params, ffi.NULL, ffi.NULL, error) == C.HR_ERR_USAGE


def all_kernels(lib):
    ffi, C = lib
    names = C.kernels_available()
    i = 0
    while names[i] != ffi.NULL:
        yield C.kernels_find(names[i])
        i += 1


def test_dot_peak_counts_its_rounds(lib):
    for kernels in all_kernels(lib):
        one = kernels.dot_peak(1)
        assert one >= 256 and kernels.dot_peak(1000) == 1000 * one and kernels.dot_peak(0) == 0


def test_read_reads_every_word(lib):
    ffi, _C = lib
    words = ffi.new("uint64_t[]", [3**i for i in range(40)] * 16)
    size = ffi.sizeof(words) // 256 * 256
    expected = sum(words[i] for i in range(size // 8)) % 2**64
    for kernels in all_kernels(lib):
        assert kernels.read(words, size) == expected
        assert kernels.read(words, 0) == 0


def test_largest_cache_is_read(lib, tmp_path):
    ffi, C = lib
    folder = tmp_path / "sys/devices/system/cpu/cpu0/cache"
    assert C.cache_size_largest(str(tmp_path).encode()) == C.CACHE_SIZE_UNKNOWN
    for index, size in enumerate(("32K", "1M", "nonsense", "524288K", "")):
        (folder / f"index{index}").mkdir(parents=True)
        (folder / f"index{index}" / "size").write_text(size + "\n")
    assert C.cache_size_largest(str(tmp_path).encode()) == 512 << 20
    assert C.bench_pool_default(512 << 20) == 2048 << 20
    assert C.bench_pool_default(1 << 20) == 256 << 20


# ---- bench MODEL -------------------------------------------------------------------------------


def model_bench(binary, *args: object) -> dict:
    done = bench(binary, *map(str, args), "--json")
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def check_phase(phase: dict, tokens: int, repeats: int) -> None:
    assert phase["tokens"] == tokens and len(phase["repeats"]) == repeats
    ordered = sorted(phase["repeats"])
    assert phase["lowest"] == ordered[0] and phase["highest"] == ordered[-1]
    middle = (ordered[(repeats - 1) // 2] + ordered[repeats // 2]) / 2
    assert phase["tokens_per_second"] == pytest.approx(middle)
    assert phase["bytes_per_token"] == pytest.approx(phase["bytes_read"] / repeats / tokens)
    requests = phase["hits"] + phase["misses"]
    assert phase["hit_rate"] == pytest.approx(phase["hits"] / requests)
    assert phase["seconds"] == pytest.approx(sum(tokens / rate for rate in phase["repeats"]))


def accounted_for(phase: dict) -> float:
    """The share of the library's three parts in what the caller's clock says."""
    parts = [phase[f"seconds_{name}"] for name in ("compute", "waiting", "other")]
    assert all(part >= 0 for part in parts) and parts[0] > 0
    assert sum(parts) <= 1.0001 * phase["seconds"]
    return sum(parts) / phase["seconds"]


def split_bench(*args: object) -> dict:
    """A run whose phases the library accounts for. Between the two clocks another program may take the
    core: one such run of twenty is enough."""
    for _ in range(20):
        found = model_bench(*args)
        if all(accounted_for(found[name]) > 0.98 for name in ("prefill", "decode") if found[name]):
            return found
    raise AssertionError(found)


@pytest.fixture(scope="module")
def id_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("ids") / "ids.txt"
    path.write_text("\n".join(str(7 * i % 500) for i in range(300)))
    return str(path)


def test_streamed_model(headrace_bin, model_dir, id_file):
    """A cache of a few records: every repeat reads, and no repeat is counted twice."""
    sizes = ["--ctx", "52", "--chunk", "8"]
    planned = subprocess.run([str(headrace_bin), "plan", str(model_dir), "--json", *sizes],
                             capture_output=True, check=True).stdout
    found = split_bench(headrace_bin, model_dir, "--ids", id_file, "--prefill", 40, "--decode", 12,
                        "--repeats", 3, "--ram", json.loads(planned)["floor"], *sizes)
    check_phase(found["prefill"], 40, 3)
    check_phase(found["decode"], 12, 3)
    decode, model = found["decode"], found["model"]
    assert decode["hits"] + decode["misses"] == 3 * 12 * model["moe_layers"] * model["top_k"]
    assert decode["bytes_read"] == decode["misses"] * model["record_bytes"] > 0
    assert decode["seconds_waiting"] > 0
    # the drive worked for no longer than the phase lasted
    assert decode["bytes_per_second_reading"] * decode["seconds"] >= 0.99 * decode["bytes_read"]
    assert found["cold"]["asked"] is found["cold"]["proven"] is False
    assert found["stats"]["tokens_decoded"] == 4 * 12  # one repeat is not measured


def test_the_cache_is_the_one_that_run_has(headrace_bin, headrace, model_dir, id_file):
    """With the same --ram, unless another context is asked for."""
    args = ["--ids", id_file, "--prefill", 8, "--decode", 2, "--repeats", 1, "--ram", "12MiB", "--threads", 2]
    planned = headrace.plan(model_dir, ram="12MiB", threads=2)
    for more, ctx in ([], planned.ctx), (["--ctx", 10], 10):
        found = model_bench(headrace_bin, model_dir, *args, *more)
        assert found["model"]["ctx"] == ctx
        there = headrace.plan(model_dir, ram="12MiB", ctx=ctx, threads=2)
        assert found["stats"]["cache_slots"] == there.cache_slots
    assert found["stats"]["cache_slots"] > planned.cache_slots


def test_more_positions_than_the_model_knows(headrace_bin, headrace, model_dir):
    most = headrace.plan(model_dir).ctx
    done = bench(headrace_bin, str(model_dir), "--prefill", str(most), "--decode", "1")
    assert done.returncode == 2 and str(most).encode() in done.stderr


def test_resident_model_reads_nothing_once_it_is_warm(headrace_bin, model_dir, id_file):
    found = split_bench(headrace_bin, model_dir, "--ids", id_file, "--prefill", 0, "--decode", 300,
                        "--repeats", 1)
    assert found["prefill"] is None
    assert found["decode"]["bytes_read"] == 0 and found["decode"]["hit_rate"] == 1
    assert found["decode"]["bytes_per_second_reading"] == 0


def test_cold_repeats_do_the_same_work_and_say_whether_the_disk_did(
        headrace_bin, model_dir, id_file):
    found = model_bench(headrace_bin, model_dir, "--ids", id_file, "--prefill", 16, "--decode", 4,
                        "--repeats", 2, "--cold")
    cold, model = found["cold"], found["model"]
    reads = found["prefill"]["bytes_read"] + found["decode"]["bytes_read"]
    assert found["decode"]["misses"] % 2 == 0 and found["prefill"]["misses"] % 2 == 0
    assert cold["asked"] and cold["library_bytes"] == reads + 2 * model["trunk_bytes"]
    if cold["physical_bytes"] is not None:
        assert cold["proven"] == (cold["physical_bytes"] >= 0.98 * cold["library_bytes"])
    text = bench(headrace_bin, str(model_dir), "--prefill", "0", "--decode", "2", "--repeats", "1",
                 "--cold").stdout.decode().splitlines()
    assert text[3].startswith("decode") and text[-1].startswith("cold: ")
    assert ("cold: proven" in text[-1]) == cold["proven"] or "could not" in text[-1]


def test_bad_ids_are_named(headrace_bin, model_dir, tmp_path):
    path = tmp_path / "ids"
    for text, code in (("", 2), ("1 x 2", 2), ("1 2 99999999", 2)):
        path.write_text(text)
        done = bench(headrace_bin, str(model_dir), "--ids", str(path), "--repeats", "1")
        assert done.returncode == code and done.stderr.startswith(b"headrace: ")
    assert bench(headrace_bin, str(model_dir), "--ids", str(tmp_path / "none")).returncode == 5
