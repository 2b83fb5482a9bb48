"""The stream that turns token bytes into valid text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

PIECES = st.lists(
    st.one_of(
        st.binary(max_size=5),
        st.sampled_from([b"\xf0\x9f", b"\x98\x80", b"\xed\xa0", b"\x80", b"\xe2\x82", b"\xac",
                         b"\xc0", b"\xf4\x90\x80\x80", b"\xf5", b"abc",
                         "\u00e9\u4e00\U0001F600".encode()]),
    ),
    max_size=20,
)


def stream(lib, pieces: list[bytes]) -> list[bytes]:
    """What each push, and at the end the flush, gives."""
    ffi, core = lib
    state = ffi.new("struct utf8_stream *")
    core.utf8_stream_init(state)
    out = []
    for piece in pieces:
        capacity = 3 * (len(piece) + 4)
        buffer = ffi.new("char[]", capacity + 1)
        buffer[capacity] = b"\x7f"
        length = core.utf8_stream_push(state, piece, len(piece), buffer)
        assert length <= capacity and buffer[capacity] == b"\x7f"
        out.append(ffi.buffer(buffer, length)[:])
    buffer = ffi.new("char[]", 12)
    out.append(ffi.buffer(buffer, core.utf8_stream_flush(state, buffer))[:])
    assert core.utf8_stream_flush(state, buffer) == 0
    return out


@settings(max_examples=500, deadline=None)
@given(PIECES)
def test_any_split_of_any_bytes(lib, pieces):
    out = stream(lib, pieces)
    for text in out:
        text.decode("utf-8")
    assert b"".join(out).decode() == b"".join(pieces).decode("utf-8", "replace")


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
def test_text_comes_as_soon_as_it_is_complete(lib, text):
    raw = text.encode()
    out = stream(lib, [raw[i : i + 1] for i in range(len(raw))])
    at = 0
    for c in text:
        size = len(c.encode())
        assert out[at : at + size - 1] == [b""] * (size - 1) and out[at + size - 1] == c.encode()
        at += size
    assert out[-1] == b""


def test_ill_formed_is_reported_at_once(lib):
    assert stream(lib, [b"\xf0\x9f", b"a"]) == [b"", b"\xef\xbf\xbda", b""]
    assert stream(lib, [b"\xff", b"\xe2\x82"]) == [b"\xef\xbf\xbd", b"", b"\xef\xbf\xbd"]
    assert stream(lib, [b"\xed", b"\xa0"]) == [b"", b"\xef\xbf\xbd" * 2, b""]
