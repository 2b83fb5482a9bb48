"""engine/advise: what the forecast makes of numbers, and what the verdict says of facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

GB, GIB, MIB = 1e9, 1 << 30, 1 << 20


@pytest.fixture
def plan(headrace):
    """48 layers of 128 experts of 2 MiB, top 8; a GiB of trunk; a cache of two working sets."""
    return headrace.Plan(
        trunk=GIB, state=0, scratch=0, io=0, overhead=0, cache=768 * 2 * MIB, total=3 * GIB,
        floor=GIB, recommended=14 * GIB, ram=3 * GIB, available=32 * GIB, record_bytes=2 * MIB,
        working_set=384 * 2 * MIB, bytes_per_token_cold=384 * 2 * MIB, cache_slots=768,
        total_experts=48 * 128, ctx=4096, chunk=512, fits=True, trunk_per_token=GIB,
        experts_per_token=384 * 2 * MIB, state_per_token=0, state_per_position=0, layers=48,
        moe_layers=48, experts=128, top_k=8, trunk_rows=4096, trunk_cols=2048, expert_width=2048,
        expert_inner=768, threads=4, io_threads=4, has_tokenizer=True, trunk_codec="int8",
        expert_codec="nl4")


def rates(headrace, *bandwidths: float, spread: float = 0) -> tuple:
    return tuple(headrace.DiskRate(2**i, 100, b, b * (1 - spread), b * (1 + spread), 0.001)
                 for i, b in enumerate(bandwidths))


@pytest.fixture
def machine(headrace):
    """A drive of 2 GB/s, memory of 40 GB/s, kernels at 20."""
    return headrace.Probe(
        disk=rates(headrace, 2 * GB, 2 * GB, 2 * GB, 2 * GB), best_depth=1, asked=10**9,
        physical=10**9, accounted=True, cold=True, direct=True, fresh=False, rotational=False,
        usb=False, network=False, memory=False, filesystem="ext4", device="nvme0n1",
        memory_rate=40 * GB, expert_rate=20 * GB, other_rate=0, trunk_rate=20 * GB,
        dispatch_seconds=0, threads=4, physical_memory=64 * GIB, available=32 * GIB,
        cgroup_room=2**64 - 1, memlock=2**64 - 1, swap_used=0, huge_pages="madvise")


@pytest.fixture
def forecast(headrace):
    return headrace.forecast


def test_everything_cached_is_arithmetic(forecast, plan, machine) -> None:
    whole = replace(plan, cache_slots=plan.total_experts)
    found = forecast(whole, replace(machine, disk=()))
    assert found.hit_rate == found.hit_low == found.hit_high == 1 and found.bytes_read == 0
    seconds = (GIB + 384 * 2 * MIB) / (20 * GB)
    assert found.tokens_per_second == pytest.approx(1 / seconds)
    assert found.seconds_compute == pytest.approx(seconds) and found.seconds_disk == 0
    assert found.limit == "compute" and set(found.levers) == {"threads"}
    fast = forecast(whole, replace(machine, expert_rate=38 * GB, trunk_rate=38 * GB))
    assert fast.limit == "memory"


def test_a_cold_cache_reads_everything(forecast, plan, machine) -> None:
    found = forecast(plan, machine, hit_rate=0)
    assert found.bytes_read == pytest.approx(384 * 2 * MIB)
    assert found.seconds_disk == pytest.approx(384 * 2 * MIB / (2 * GB))
    # Reads wait for the trunk of their layer, and the last expert of a layer for its read.
    seconds = found.seconds_disk + (GIB + 48 * 2 * MIB) / (20 * GB)
    assert found.tokens_per_second == pytest.approx(1 / seconds)
    assert found.limit == "disk"


def test_misses_as_counted_beat_a_mean(forecast, plan, machine) -> None:
    even = forecast(plan, machine, misses=[0, 0, 0, 0, 1])
    uneven = forecast(plan, machine, misses=[0.5, 0, 0, 0, 0, 0, 0, 0, 0.5])
    assert even.hit_rate == pytest.approx(0.5) and uneven.hit_rate == pytest.approx(0.5)
    assert even.bytes_read == pytest.approx(uneven.bytes_read)
    assert even.tokens_per_second != uneven.tokens_per_second
    mean = forecast(plan, machine, hit_rate=0.5)
    assert mean.bytes_read == pytest.approx(even.bytes_read)


def test_shared_experts_are_computed_while_others_are_read(forecast, plan, machine) -> None:
    shared = replace(plan, trunk_per_token=GIB + 96 * MIB, shared_per_token=96 * MIB)
    seconds = {hits: 1 / forecast(shared, machine, hit_rate=hits).tokens_per_second for hits in (0, 1)}
    alone = {hits: 1 / forecast(plan, machine, hit_rate=hits).tokens_per_second for hits in (0, 1)}
    assert seconds[0] == pytest.approx(alone[0]), "2 MiB in a layer that waits for eight records"
    assert seconds[1] == pytest.approx(alone[1] + 96 * MIB / (20 * GB))
    for hits in (0, 0.5, 1):
        found = forecast(shared, machine, hit_rate=hits)
        assert found.seconds_compute == pytest.approx((GIB + 96 * MIB + 384 * 2 * MIB) / (20 * GB))


def test_depth_follows_what_a_layer_misses(headrace, forecast, plan, machine) -> None:
    deep = replace(machine, disk=rates(headrace, 1 * GB, 2 * GB, 4 * GB, 8 * GB), best_depth=8)
    one = forecast(plan, deep, misses=[0, 1])
    four = forecast(plan, deep, misses=[0, 0, 0, 0, 1])
    assert one.seconds_disk == pytest.approx(48 * 2 * MIB / GB)
    assert four.seconds_disk == pytest.approx(one.seconds_disk), "four at a time take as long as one"
    eight = forecast(plan, deep, misses=[0] * 8 + [1])
    assert eight.seconds_disk == pytest.approx(2 * one.seconds_disk), "four reader threads"
    more = forecast(replace(plan, io_threads=8), deep, misses=[0] * 8 + [1])
    assert more.seconds_disk == pytest.approx(one.seconds_disk)
    assert any("--io-threads 8" in text for _, text in eight.reasons)
    between = forecast(plan, deep, misses=[0, 0, 0, 1])
    assert between.seconds_disk == pytest.approx(48 * 3 * 2 * MIB / (3.17 * GB), rel=0.01)


def test_the_table_of_hit_rates(lib) -> None:
    expected = lib[1].hit_rate_expected
    sizes = [0, 24, 96, 200, 384, 500, 768, 1500, 3000, 6000, 6143]
    for experts, top_k in ((64, 8), (128, 8), (256, 8), (896, 16), (16, 2)):
        layers = 6144 // experts
        found = [expected(n, layers, experts, top_k) for n in sizes]
        assert found == sorted(found) and found[0] == 0 and found[-1] > 0.95
        assert expected(layers * experts, layers, experts, top_k) == 1
    assert expected(10, 0, 0, 0) == 1
    assert expected(384, 48, 64, 8) > expected(384, 48, 256, 8) > expected(768, 48, 896, 16)


def test_more_of_anything_is_never_slower(headrace, forecast, plan, machine) -> None:
    base = forecast(plan, machine)
    assert base.low < base.tokens_per_second < base.high
    assert base.hit_low < base.hit_rate < base.hit_high
    for better in (forecast(replace(plan, cache_slots=1500), machine),
                   forecast(plan, replace(machine, disk=rates(headrace, *[4 * GB] * 4))),
                   forecast(plan, replace(machine, expert_rate=30 * GB)),
                   forecast(plan, replace(machine, trunk_rate=30 * GB))):
        assert better.tokens_per_second > base.tokens_per_second
    late = forecast(replace(plan, state_per_position=1 << 18), machine, position=4000)
    assert late.tokens_per_second < base.tokens_per_second


def test_the_band_holds_the_estimate_whatever_is_known(forecast, plan, machine) -> None:
    for misses in ([0.1] * 2 + [0] * 6 + [0.8], [1], [0] * 8 + [1], [0.5, 0.5]):
        found = forecast(plan, machine, misses=misses)
        assert found.low < found.tokens_per_second < found.high
        assert found.levers["threads"] >= found.tokens_per_second * 0.999
        assert all(rate >= found.tokens_per_second for rate in found.levers.values())


def test_a_noisy_drive_widens_the_band(headrace, forecast, plan, machine) -> None:
    calm = forecast(plan, machine, hit_rate=0.5)
    noisy = forecast(plan, replace(machine, disk=rates(headrace, *[2 * GB] * 4, spread=0.5)), hit_rate=0.5)
    assert noisy.tokens_per_second == pytest.approx(calm.tokens_per_second)
    assert noisy.low < calm.low and noisy.high > calm.high


def test_levers(headrace, forecast, plan, machine) -> None:
    slow = replace(machine, disk=rates(headrace, *[0.2 * GB] * 4), other_rate=10 * GB)
    found = forecast(plan, slow, other_record_bytes=3 * MIB // 2)
    assert set(found.levers) == {"ram", "faster_drive", "second_drive", "codec", "threads"}
    faster = forecast(plan, replace(slow, disk=rates(headrace, *[0.4 * GB] * 4)))
    assert found.levers["faster_drive"] == pytest.approx(faster.tokens_per_second)
    assert found.tokens_per_second < found.levers["second_drive"] < found.levers["faster_drive"]
    assert found.levers["codec"] > found.tokens_per_second
    assert found.best_lever == max(found.levers, key=found.levers.get)
    larger = forecast(replace(plan, cache_slots=768 + 1536), slow)
    assert found.levers["ram"] == pytest.approx(larger.tokens_per_second)
    assert "codec" not in forecast(plan, slow, other_record_bytes=2 * MIB).levers
    idle = forecast(replace(plan, cache_slots=plan.total_experts),
                    replace(machine, expert_rate=40 * GB, trunk_rate=40 * GB))
    assert idle.best_lever is None, "memory is the limit, and nothing here makes it faster"


def test_what_a_probe_must_hold(headrace, forecast, plan, machine) -> None:
    with pytest.raises(headrace.UsageError, match="did not measure the drive"):
        forecast(plan, replace(machine, disk=()))
    with pytest.raises(headrace.UsageError, match="no rates"):
        forecast(plan, replace(machine, expert_rate=0))
    with pytest.raises(headrace.UsageError, match="hit_rate"):
        forecast(plan, machine, hit_rate=1.5)


def test_ready(forecast, plan, machine) -> None:
    found = forecast(plan, machine)
    assert (found.verdict, found.reasons) == ("ready", ())


@pytest.mark.parametrize("change, grade, text", [
    ({"fits": False, "floor": 40 * GIB}, "no", "at least 40.00 GiB"),
    ({"fits": False, "floor": 4 * GIB}, "no", "raise ram"),
    ({"ram": 33 * GIB}, "no", "33.00 GiB"),
    ({"ram": 31 * GIB}, "warn", "31.00 of 32.00"),
    ({"cache_slots": 100}, "warn", "one token needs 384"),
    ({"has_tokenizer": False}, "warn", "no tokenizer"),
])
def test_verdict_on_the_plan(forecast, plan, machine, change: dict, grade: str, text: str) -> None:
    found = forecast(replace(plan, **change), machine)
    assert found.verdict == grade == found.reasons[0][0] and text in found.reasons[0][1]


@pytest.mark.parametrize("change, grade, text", [
    ({"cold": False, "physical": 10**8}, "warn", "10 % of the bytes"),
    ({"cold": False, "accounted": False}, "warn", "does not say"),
    ({"direct": False}, "warn", "page cache on ext4"),
    ({"rotational": True}, "warn", "nvme0n1 is a spinning"),
    ({"usb": True}, "warn", "USB"),
    ({"network": True, "filesystem": "nfs4"}, "warn", "network (nfs4)"),
    ({"memory": True, "filesystem": "tmpfs", "cold": False}, "warn", "in memory (tmpfs)"),
    ({"swap_used": 8 * GIB}, "warn", "8.00 GiB are swapped"),
    ({"fresh": True}, "note", "just written"),
    ({"cgroup_room": 20 * GIB, "available": 20 * GIB}, "note", "control group leaves 20.00"),
    ({"memlock": 8 * MIB}, "note", "8.0 MiB may be locked"),
    ({"huge_pages": "never"}, "note", "huge pages"),
])
def test_verdict_on_the_machine(forecast, plan, machine, change: dict, grade: str, text: str) -> None:
    found = forecast(plan, replace(machine, **change))
    assert found.verdict == {"note": "ready"}.get(grade, grade)
    assert len(found.reasons) == 1
    assert found.reasons[0][0] == grade and text in found.reasons[0][1]


def test_a_slow_drive_does_not_matter_when_all_is_cached(forecast, plan, machine) -> None:
    whole = replace(plan, cache_slots=plan.total_experts)
    found = forecast(whole, replace(machine, rotational=True, usb=True))
    assert found.verdict == "ready" and [grade for grade, _ in found.reasons] == ["note"] * 2


def test_the_gravest_reason_comes_first(headrace, forecast, plan, machine) -> None:
    found = forecast(replace(plan, has_tokenizer=False),
                     replace(machine, memlock=1, fresh=True, disk=rates(headrace, *[1e7] * 4)))
    assert [grade for grade, _ in found.reasons] == ["warn", "warn", "note", "note"]
    assert "slower than a token" in found.reasons[0][1]
