"""engine/store/cache_usage.c: use counts in a file (formats/usage.md), and what they do to the cache."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from containers import crc32c, make_container
from store_tools import AUTO, FORMAT, IO, LFU, LRU, UNSUPPORTED, Cache, Container, StoreError, check

LAYERS, EXPERTS, MOST = 3, 6, 1 << 17


@pytest.fixture(scope="module")
def container(lib, tmp_path_factory):
    path = tmp_path_factory.mktemp("usage") / "c"
    make_container(path, layers=LAYERS, experts=EXPERTS, hidden=32, inner=16, codec="bf16")
    with Container(lib, path) as c:
        yield c


def load(cache: Cache, path: Path) -> None:
    err = cache.ffi.new("hr_error *")
    check(cache.ffi, cache.C.cache_usage_load(cache.p, os.fsencode(path), err), err)


def save(cache: Cache, path: Path) -> None:
    err = cache.ffi.new("hr_error *")
    check(cache.ffi, cache.C.cache_usage_save(cache.p, os.fsencode(path), err), err)


def sha(container) -> str:
    return container.ffi.string(container.p.sha256).decode()


def image(container, layers: list[tuple[int, list[int]]], digest: str | None = None, *,
          version: int = 1, count: int | None = None, length: int | None = None) -> bytes:
    """A file as formats/usage.md says, checksums right."""
    body = b"".join(struct.pack(f"<{1 + len(uses)}I", tokens, *uses) for tokens, uses in layers)
    head = struct.pack("<8sII32sQII", b"HRUSAGE1", version, len(layers) if count is None else count,
                       bytes.fromhex(digest or sha(container)),
                       64 + len(body) + 4 if length is None else length, 0, 0)
    return head[:60] + struct.pack("<I", crc32c(head)) + body + struct.pack("<I", crc32c(body))


def layers_of(data: bytes) -> list[tuple[int, list[int]]]:
    words = struct.unpack(f"<{(len(data) - 68) // 4}I", data[64:-4])
    step = 1 + EXPERTS
    return [(words[i], list(words[i + 1 : i + step])) for i in range(0, len(words), step)]


FLAT = [(8, [8, 4, 2, 1, 0, 0])] * LAYERS


# ---- what is written ----


def test_counts_are_those_of_the_requests(container, tmp_path) -> None:
    with Cache(container, 4) as cache:
        cache.run(0, [1, 2])
        cache.run(0, [2, 5])
        cache.begin(1, [0, 3], chunk=[[0], [0, 3], [3], []])
        while (lease := cache.next()) is not None:
            cache.release(lease)
        save(cache, tmp_path / "u")
    want = [(2, [0, 1, 2, 0, 0, 1]), (4, [2, 0, 0, 2, 0, 0]), (0, [0] * EXPERTS)]
    assert (tmp_path / "u").read_bytes() == image(container, want)
    assert (tmp_path / "u").stat().st_mode & 0o777 == 0o600 and not (tmp_path / "u.partial").exists()


def test_counts_go_on_from_the_file(container, tmp_path) -> None:
    """Read and written again without a request it is the same; runs add up."""
    (tmp_path / "u").write_bytes(image(container, FLAT))
    for turn in range(3):
        with Cache(container, 4) as cache:
            load(cache, tmp_path / "u")
            if turn:
                cache.run(2, [4, 5])
            save(cache, tmp_path / "u")
        assert layers_of((tmp_path / "u").read_bytes()) == [
            *FLAT[:2], (8 + turn, [8, 4, 2, 1, turn, turn])]


def test_old_uses_count_half(container, tmp_path) -> None:
    (tmp_path / "u").write_bytes(image(container, [(MOST, [MOST, 3, 1, 0, 0, 0])] * LAYERS))
    with Cache(container, 4) as cache:
        load(cache, tmp_path / "u")
        cache.run(0, [1])
        save(cache, tmp_path / "u")
    assert layers_of((tmp_path / "u").read_bytes())[:2] == [
        (MOST // 2 + 1, [MOST // 2, 2, 0, 0, 0, 0]), (MOST, [MOST, 3, 1, 0, 0, 0])]


# ---- what it does ----


def misses(cache: Cache, expert: int) -> bool:
    before = cache.stats()["misses"]
    cache.run(0, [expert])
    return cache.stats()["misses"] > before


@pytest.mark.parametrize("policy", [AUTO, LFU])
def test_what_was_used_most_stays_first_and_not_for_ever(container, tmp_path, policy) -> None:
    (tmp_path / "u").write_bytes(image(container, [(1000, [1000, 10, 10, 10, 0, 0])] * LAYERS))
    for seeded in (False, True):
        with Cache(container, 2, policy=policy, working_set=2) as cache:
            if seeded:
                load(cache, tmp_path / "u")
            for expert in (0, 1, 2, 1):
                cache.run(0, [expert])
            assert misses(cache, 0) == (not seeded)
            assert cache.stats()["bytes_read"] == cache.stats()["reads"] * container.p.banks[0].record.bytes
            for _ in range(200):
                for expert in (4, 5):
                    cache.run(0, [expert])
            assert misses(cache, 0), "nothing is pinned"
            assert cache.stats()["leases"] == 0


def test_recency_puts_requests_before_the_past(container, tmp_path) -> None:
    (tmp_path / "u").write_bytes(image(container, [(9, [9, 0, 0, 1, 0, 0])] * LAYERS))
    with Cache(container, 2, policy=LRU) as cache:
        load(cache, tmp_path / "u")
        for expert in (0, 1, 2):
            cache.run(0, [expert])
        assert not misses(cache, 1) and misses(cache, 0)


# ---- what is refused ----


def refused(container, path: Path, data: bytes | None = None) -> StoreError:
    """By the check before opening and by the load alike."""
    if data is not None:
        path.write_bytes(data)
    err = container.ffi.new("hr_error *")
    with pytest.raises(StoreError) as early:
        check(container.ffi, container.C.cache_usage_check(container.p, os.fsencode(path), err), err)
    with Cache(container, 2) as cache, pytest.raises(StoreError) as late:
        load(cache, path)
    assert str(late.value) == str(early.value) and str(path) in early.value.detail
    return early.value


@pytest.mark.parametrize(("code", "text", "change"), [
    (FORMAT, "not a file of use counts", dict(raw=b"HRSESS01" + bytes(200))),
    (FORMAT, "another container, " + "ab" * 32, dict(digest="ab" * 32)),
    (UNSUPPORTED, "version 2", dict(version=2)),
    (FORMAT, "bytes for 4 layers", dict(count=4)),
    (FORMAT, "are needed", dict(length=1 << 62)),
    (FORMAT, "are needed", dict(layers=FLAT[:2], count=3)),
    (FORMAT, "are needed", dict(layers=FLAT + FLAT[:1], count=3)),
    (FORMAT, "more uses than tokens", dict(layers=[*FLAT[:2], (8, [9, 0, 0, 0, 0, 0])])),
    (FORMAT, "more uses than tokens", dict(layers=[*FLAT[:2], (MOST + 1, [0] * 6)])),
    (FORMAT, "more uses than tokens", dict(layers=[(2**32 - 1, [2**32 - 1] * 6), *FLAT[:2]])),
])
def test_lies_with_right_checksums(container, tmp_path, code, text, change) -> None:
    raw = change.pop("raw", None)
    data = raw or image(container, change.pop("layers", FLAT), **change)
    error = refused(container, tmp_path / "u", data)
    assert error.code == code and text in error.detail, error.detail
    if "another" in text:
        assert sha(container) in error.detail


def test_no_files(container, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refused(container, tmp_path / "pipe").code == FORMAT
    assert refused(container, tmp_path).code in (FORMAT, IO)
    assert refused(container, Path("/dev/zero")).code == FORMAT
    missing = refused(container, tmp_path / "none")
    assert missing.code == IO and "No such file" in missing.detail


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_damage_is_refused(container, tmp_path, data) -> None:
    whole = image(container, FLAT)
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "swap", "noise"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if kind == "flip":
        hurt = bytearray(whole)
        hurt[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        hurt = whole[:at]
    elif kind == "longer":
        hurt = whole + data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "swap":
        hurt = bytearray(whole)
        hurt[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
        hurt = hurt[: len(whole)]
    else:
        hurt = data.draw(st.binary(max_size=200))
    if bytes(hurt) != whole:
        assert refused(container, tmp_path / "u", bytes(hurt)).code in (FORMAT, UNSUPPORTED, IO)
