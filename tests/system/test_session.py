"""Sessions through the C interface: save, load, fork, poison, limits (formats/session.md)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.engine import Engine

PROMPT = [7, 11, 3, 99, 250, 1024, 5, 6, 7, 8]
NEXT = [42, 17, 300]


@pytest.fixture
def engine(lib, model_dir):
    made = []

    def open_model(path: Path = model_dir, **params) -> Engine:
        made.append(Engine(lib, path, **params))
        return made[-1]

    sessions: list = []
    yield open_model, sessions
    for owner, session in sessions:
        owner.c.hr_session_free(session)
    for one in made:
        assert one.leases() == 0
        one.c.hr_model_close(one.model)


def new_session(opened: Engine, sessions: list):
    sessions.append((opened, opened.session()))
    return sessions[-1][1]


def test_saved_state_continues_with_the_same_bits(engine, tmp_path):
    open_model, sessions = engine
    opened = open_model()
    first = new_session(opened, sessions)
    opened.eval(first, PROMPT)
    opened.save(first, tmp_path / "state")
    want = [opened.eval(first, [i]) for i in NEXT]
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600
    assert not (tmp_path / "state.partial").exists()
    second = new_session(opened, sessions)
    opened.eval(second, [1, 2, 3])
    opened.load(second, tmp_path / "state")
    assert opened.c.hr_session_position(second) == len(PROMPT)
    assert [opened.eval(second, [i]) for i in NEXT] == want
    other = open_model(ctx=32, threads=1, chunk=3, isa=b"reference")
    third = new_session(other, sessions)
    other.load(third, tmp_path / "state")
    assert [other.eval(third, [i]) for i in NEXT] == want


def test_fork_goes_its_own_way(engine):
    open_model, sessions = engine
    opened = open_model()
    first = new_session(opened, sessions)
    opened.eval(first, PROMPT)
    out = opened.ffi.new("hr_session **")
    opened.check(opened.c.hr_session_fork(first, out, opened.err))
    sessions.append((opened, out[0]))
    away = opened.eval(out[0], [1, 2, 3])
    want = opened.eval(first, NEXT)
    opened.c.hr_session_reset(out[0])
    assert opened.eval(out[0], PROMPT + NEXT) == want != away
    with pytest.raises(RuntimeError, match="max_sessions"):
        opened.session()


def damaged(data: bytes) -> dict[str, bytes]:
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    header = bytearray(data)
    header[52] ^= 1
    tail = bytearray(data)
    tail[-1] ^= 1
    return {"empty": b"", "header cut": data[:100], "cut": data[:-5], "longer": data + b"\0",
            "flipped": bytes(flipped), "header": bytes(header), "tail": bytes(tail),
            "noise": bytes(range(256)) * 4}


def test_failed_load_leaves_the_session_as_it_was(engine, lib, tmp_path, model_bf16):
    open_model, sessions = engine
    opened = open_model()
    session = new_session(opened, sessions)
    opened.eval(session, PROMPT)
    opened.save(session, tmp_path / "good")
    opened.save(session, tmp_path / "before")
    want = opened.eval(session, NEXT)
    other = open_model(model_bf16)
    stranger = new_session(other, sessions)
    other.eval(stranger, PROMPT)
    other.save(stranger, tmp_path / "other container")
    for name, data in damaged((tmp_path / "good").read_bytes()).items():
        (tmp_path / name).write_bytes(data)
    bad = [p for p in tmp_path.iterdir() if p.name not in ("good", "before")]
    bad += [tmp_path / "missing", tmp_path]
    for path in bad:
        opened.load(session, tmp_path / "before")
        with pytest.raises(RuntimeError):
            opened.load(session, path)
        assert opened.c.hr_session_position(session) == len(PROMPT), path
        assert opened.eval(session, NEXT) == want, path


def test_longer_state_than_ctx_is_refused_with_both_numbers(engine, tmp_path):
    open_model, sessions = engine
    opened = open_model()
    session = new_session(opened, sessions)
    opened.eval(session, PROMPT)
    opened.save(session, tmp_path / "state")
    small = open_model(ctx=8)
    with pytest.raises(RuntimeError, match="10 tokens.* 8"):
        small.load(new_session(small, sessions), tmp_path / "state")


def test_save_into_a_missing_directory_is_an_error(engine, tmp_path):
    open_model, sessions = engine
    opened = open_model()
    session = new_session(opened, sessions)
    with pytest.raises(RuntimeError, match="cannot create"):
        opened.save(session, tmp_path / "no" / "state")


def test_context_and_vocabulary_limits_touch_nothing(engine):
    open_model, sessions = engine
    opened = open_model(ctx=16)
    session = new_session(opened, sessions)
    opened.eval(session, PROMPT)
    with pytest.raises(RuntimeError, match="7 tokens are needed and 6 of 16"):
        opened.eval(session, [1] * 7)
    for bad in (-1, opened.vocab, 2**31 - 1):
        with pytest.raises(RuntimeError, match=f"{bad}; the vocabulary"):
            opened.eval(session, [1, bad])
    assert opened.c.hr_session_position(session) == len(PROMPT)
    want = opened.eval(session, NEXT)
    opened.c.hr_session_reset(session)
    assert opened.eval(session, PROMPT + NEXT) == want


def test_cancelled_prefill_poisons_until_reset(engine):
    open_model, sessions = engine
    opened = open_model(chunk=1)
    session = new_session(opened, sessions)
    want = opened.eval(session, NEXT)
    opened.c.hr_session_reset(session)
    ffi = opened.ffi
    fired = []

    @ffi.callback("int64_t(int, void *, size_t, int64_t)")
    def pread(fd, buffer, size, offset):
        data = os.pread(fd, size, offset)
        ffi.memmove(buffer, data, len(data))
        fired.append(1)
        opened.c.hr_cancel(session)
        return len(data)

    cold = open_model(max_sessions=1, direct=0)
    session_cold = new_session(cold, sessions)
    opened.c.direct_io_set_pread(pread)
    try:
        session, opened = session_cold, cold
        with pytest.raises(RuntimeError, match="cancelled"):
            cold.eval(session_cold, PROMPT)
    finally:
        cold.c.direct_io_set_pread(ffi.NULL)
    assert fired
    with pytest.raises(RuntimeError, match="reset"):
        cold.eval(session_cold, NEXT)
    cold.c.hr_session_reset(session_cold)
    assert cold.eval(session_cold, NEXT) == want
