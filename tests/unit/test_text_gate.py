"""Raw token bytes to visible text: UTF-8 boundaries, stop strings, held-back text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HR_OK, HR_ERR_USAGE, HR_ERR_FORMAT = 0, 1, 2


class Gate:
    def __init__(self, lib, stop: list[bytes], longest: int = 256):
        self.ffi, self.c = lib
        self.g = self.ffi.new("struct text_gate *")
        layout = self.ffi.new("struct carve *")
        self.c.text_gate_carve(layout, longest, self.g)
        # Of exactly that size: the sanitizer build sees a byte too many.
        self.memory = self.ffi.gc(self.ffi.cast("char *", self.c.mem_alloc(self.ffi.NULL, layout.used)),
                                  lambda p, n=layout.used: self.c.mem_free(self.ffi.NULL, p, n))
        layout.base, layout.used = self.ffi.cast("uint8_t *", self.memory), 0
        self.c.text_gate_carve(layout, longest, self.g)
        self.err = self.ffi.new("hr_error *")
        self.strings = [self.ffi.new("char[]", s) for s in stop]
        self.list = self.ffi.new("char *[]", self.strings)
        self.status = self.c.text_gate_open(self.g, self.list, len(stop), self.err)

    @property
    def detail(self) -> str:
        return self.ffi.string(self.err.detail).decode()

    def push(self, data: bytes, end: bool = False) -> tuple[bytes, int]:
        """(text that became visible, index of the stop string or -1)"""
        stopped = self.ffi.new("int32_t *")
        buffer = self.ffi.new("char[]", data)
        status = self.c.text_gate_push(self.g, buffer, len(data), end, stopped, self.err)
        assert status == HR_OK, self.detail
        text = self.ffi.buffer(self.g.text, self.g.ready)[:]
        self.c.text_gate_take(self.g)
        return text, stopped[0]

    def run(self, pieces: list[bytes]) -> tuple[str, int, list[str]]:
        """(all text, stop index, the pieces as they became visible)"""
        shown: list[str] = []
        for i, piece in enumerate(pieces):
            text, stopped = self.push(piece, end=i == len(pieces) - 1)
            shown.append(text.decode("utf-8"))  # every piece must be valid by itself
            if stopped >= 0:
                return "".join(shown), stopped, shown
        return "".join(shown), -1, shown


def run(lib, pieces: list[bytes], stop: list[str]) -> tuple[str, int, list[str]]:
    gate = Gate(lib, [s.encode() for s in stop], max(map(len, pieces)))
    assert gate.status == HR_OK, gate.detail
    return gate.run(pieces)


def expected(text: str, stop: list[str]) -> tuple[str, int]:
    """The rule, character by character: first complete, then longest, then lowest index."""
    for end in range(1, len(text) + 1):
        found = [(-len(s.encode()), i) for i, s in enumerate(stop) if text[:end].endswith(s)]
        if found:
            i = min(found)[1]
            return text[: end - len(stop[i])], i
    return text, -1


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(a % (len(data) + 1) for a in at)})
    return [data[a:b] for a, b in zip(edges, edges[1:])] or [b""]


@given(st.binary(max_size=60), st.lists(st.integers(0, 100), max_size=12))
@settings(max_examples=200, deadline=None)
def test_pieces_concatenate_to_the_decoded_whole(lib, data, at):
    text, stopped, _ = run(lib, cut(data, at), [])
    assert stopped == -1
    assert text == data.decode("utf-8", errors="replace")


@given(st.text(alphabet="abcé😀", max_size=30), st.lists(st.integers(0, 100), max_size=12),
       st.lists(st.text(alphabet="abcé😀", min_size=1, max_size=4), min_size=1, max_size=4))
@settings(max_examples=400, deadline=None)
def test_stop_strings_do_not_depend_on_the_tokens(lib, text, at, stop):
    """Cut anywhere, inside characters too: same text, same stop string."""
    shown, stopped, _ = run(lib, cut(text.encode(), at), stop)
    assert (shown, stopped) == expected(text, stop)


def test_an_emoji_in_two_tokens(lib):
    raw = "😀".encode()
    assert run(lib, [raw[:2], raw[2:] + b"z"], [])[2] == ["", "😀z"]
    assert run(lib, [b"a" + raw[:3]], [])[0] == "a\ufffd"
    assert run(lib, [b"\xff", b"a", raw[:1]], [])[2] == ["\ufffd", "a", "\ufffd"]


def test_only_what_might_begin_a_stop_string_is_held_back(lib):
    _, stopped, shown = run(lib, [b"a S", b"TO", b"x S", b"TOP y"], ["STOP"])
    assert shown == ["a ", "", "STOx ", ""]
    assert stopped == 0
    assert run(lib, [b"ab", b"ST"], ["STOP"])[2] == ["ab", "ST"]  # the end gives it back


def test_stop_string_in_the_middle_of_a_token(lib):
    assert run(lib, [b"one.\n\nTwo"], ["\n\n"])[:2] == ("one.", 0)
    assert run(lib, [b"xab"], ["b", "ab"])[:2] == ("x", 1)
    assert run(lib, [b"abc"], ["abcd", "bc"])[:2] == ("a", 1)


def test_long_tokens(lib):
    data = ("é" * 50_000).encode()
    assert run(lib, [data, data[:-1]], ["never"])[0] == "é" * 99_999 + "\ufffd"


def test_the_worst_tokens_fit_the_room_for_them(lib):
    """Every byte becomes three, behind all that can be held back."""
    gate = Gate(lib, [b"x" * 256], longest=40)
    for _ in range(3):
        assert gate.push(b"x" * 40)[1] == -1
    for i in range(255 - 120):
        gate.push(b"x")
    text, stopped = gate.push(b"\xf0\x9f\x98" + b"\xff" * 37, end=True)
    assert (text.decode(), stopped) == ("x" * 255 + "\ufffd" * 38, -1)


def test_a_token_longer_than_the_longest_is_refused(lib):
    gate = Gate(lib, [], longest=40)
    stopped = gate.ffi.new("int32_t *")
    assert gate.c.text_gate_push(gate.g, b"y" * 500, 500, False, stopped, gate.err) == HR_ERR_FORMAT
    assert gate.push(b"z") == (b"z", -1)


@pytest.mark.parametrize("stop,word", [
    ([b""], "empty"), ([b"x" * 257], "too long"), ([b"ok", b"\xff"], "UTF-8"), ([b"a"] * 17, "16"),
])
def test_bad_stop_strings_are_refused(lib, stop, word):
    gate = Gate(lib, stop)
    assert gate.status == HR_ERR_USAGE
    assert word in gate.detail


def test_longest_stop_strings_are_accepted(lib):
    gate = Gate(lib, [b"x" * 256] * 16)
    assert gate.status == HR_OK
    assert gate.push(b"y" + b"x" * 255) == (b"y", -1)
    assert gate.push(b"x") == (b"", 0)
