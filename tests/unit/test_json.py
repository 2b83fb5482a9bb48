"""The strict JSON reader against Python's, and against hostile text."""

from __future__ import annotations

import json
import math
import random
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

INT_MIN, INT_MAX = -(2**63), 2**63 - 1
MAX_DEPTH = 16


class Refused(Exception):
    """The reader returned an error; the text is its detail."""


class Reader:
    """Python values out of json_parse."""

    def __init__(self, lib: tuple) -> None:
        self.ffi, self.C = lib

    def parse(self, text: bytes) -> Any:
        ffi, C = self.ffi, self.C
        out, err = ffi.new("struct json_doc **"), ffi.new("hr_error *")
        buffer = ffi.from_buffer("char[]", text) if text else ffi.NULL
        status = C.json_parse(buffer, len(text), b"test.json", out, err)
        if status != C.HR_OK:
            assert out[0] == ffi.NULL
            assert status == C.HR_ERR_FORMAT and err.code == status
            raise Refused(ffi.string(err.detail).decode())
        try:
            return self.value(C.json_root(out[0]))
        finally:
            C.json_free(out[0])

    def value(self, v: Any) -> Any:
        ffi, C = self.ffi, self.C
        kind = C.json_kind(v)
        if kind == C.JSON_NULL:
            return None
        if kind == C.JSON_BOOL:
            flag = ffi.new("bool *")
            assert C.json_bool(v, flag)
            return bool(flag[0])
        if kind == C.JSON_INT:
            integer = ffi.new("int64_t *")
            assert C.json_int(v, integer)
            return int(integer[0])
        if kind == C.JSON_REAL:
            return self.real(v)
        if kind == C.JSON_STRING:
            length = ffi.new("size_t *")
            text = C.json_string(v, length)
            return ffi.buffer(text, length[0])[:].decode()
        if kind == C.JSON_ARRAY:
            return [self.value(C.json_at(v, i)) for i in range(C.json_len(v))]
        members = {}
        for i in range(C.json_len(v)):
            key = ffi.string(C.json_key_at(v, i))
            child = C.json_value_at(v, i)
            assert C.json_get(v, key) == child
            members[key.decode()] = self.value(child)
        return members

    def real(self, v: Any) -> float | None:
        out = self.ffi.new("double *")
        return out[0] if self.C.json_real(v, out) else None

    def real_of(self, text: bytes) -> float | None:
        """json_real of a document that is one value."""
        ffi, C = self.ffi, self.C
        out, err = ffi.new("struct json_doc **"), ffi.new("hr_error *")
        assert C.json_parse(text, len(text), b"t", out, err) == C.HR_OK, ffi.string(err.detail)
        value = self.real(C.json_root(out[0]))
        C.json_free(out[0])
        return value


@pytest.fixture(scope="module")
def reader(lib) -> Reader:
    return Reader(lib)


def same(a: Any, b: Any) -> bool:
    """Equal with kinds and the sign of zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


def short_real(text: str) -> bool:
    """At most 15 digits and a power of ten within 22, zeros at both ends not counted."""
    number = Decimal(text)
    if number == 0:
        return True
    digits = "".join(map(str, number.as_tuple().digits))
    kept = digits.rstrip("0")
    power = number.as_tuple().exponent + len(digits) - len(kept)
    return len(kept.lstrip("0")) <= 15 and -22 <= power <= 22


def expected(text: bytes) -> Any:
    """What the strict reader must return, by Python's json; ValueError when it must refuse."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({k for k, _ in items}) != len(items):
            raise ValueError("duplicate key")
        if any("\0" in k for k, _ in items):
            raise ValueError("NUL in a key")
        return dict(items)

    def real(digits: str) -> float:
        if not short_real(digits):
            raise ValueError("long real")
        return float(digits)

    def integer(digits: str) -> int:
        value = int(digits)
        if not INT_MIN <= value <= INT_MAX:
            raise ValueError("integer range")
        return value

    def constant(name: str) -> None:
        raise ValueError(name)

    value = json.loads(text.decode("utf-8"), object_pairs_hook=pairs, parse_float=real,
                       parse_int=integer, parse_constant=constant)
    json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates
    if depth(value) > MAX_DEPTH:
        raise ValueError("depth")
    return value


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


short_reals = st.builds(
    lambda m, e: float(f"{m}e{e}"),
    st.integers(-(10**15) + 1, 10**15 - 1), st.integers(-22, 0),
).filter(lambda x: short_real(repr(x)))
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(INT_MIN, INT_MAX) | short_reals | texts,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=12),
    max_leaves=40,
).filter(lambda v: depth(v) <= MAX_DEPTH)


@settings(max_examples=300, deadline=None)
@given(value=values, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_round_trip(reader: Reader, value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    assert same(reader.parse(text), value)


@settings(max_examples=600, deadline=None)
@given(value=values, seed=st.integers(0, 2**32 - 1))
def test_damaged_text_is_judged_as_by_python(reader: Reader, value: Any, seed: int) -> None:
    rng = random.Random(seed)
    text = bytearray(json.dumps(value, ensure_ascii=rng.random() < 0.5).encode())
    pieces = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0041", b"\\ud800", b"\\udc00",
              b"0", b"1", b"\\u0000", b"-", b"+", b".", b"e5", b"E-3", b"null", b"NaN", b"\xff", b"\xed\xa0\x80",
              b" ", b"\t", b"\r\n", b"\x01", b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"\xc0\x80"]
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(text) + 1)
        action = rng.randrange(3)
        if action == 0:
            text[at:at] = rng.choice(pieces)
        elif action == 1:
            del text[at:at + rng.randrange(1, 4)]
        else:
            text[at:at + 1] = rng.choice(pieces)
    try:
        wanted = expected(bytes(text))
    except (ValueError, RecursionError):
        with pytest.raises(Refused):
            reader.parse(bytes(text))
        return
    assert same(reader.parse(bytes(text)), wanted)


@pytest.mark.parametrize(("text", "says"), [
    (b"", "byte 0: the text ends"),
    (b"  ", "byte 2: the text ends"),
    (b"{}x", "byte 2: something follows"),
    (b"1 2", "byte 2: something follows"),
    (b"\xef\xbb\xbf{}", "byte 0"),
    (b"[1,]", "byte 3"),
    (b"[,1]", "byte 1"),
    (b"[1 2]", "byte 3: expected ','"),
    (b"[1", "byte 2"),
    (b'{"a"}', "expected ':'"),
    (b'{"a":1,}', "expected a key"),
    (b"{a:1}", "expected a key"),
    (b'{"a":1', "byte 6"),
    (b'{"a":1,"b":2,"a":3}', 'the key "a" twice'),
    (b'{"a":1,"\\u0061":3}', 'the key "a" twice'),
    (b'[{"x":{"a":1,"a":2}}]', "byte 6"),
    (b'{"a\\u0000b":1}', "byte 1: a key with a NUL"),
    (b'"abc', "byte 0: a string is not closed"),
    (b'"abc\\', "byte 4: a string is not closed"),
    (b'"a\nb"', "byte 2: a control character"),
    (b'"\\x41"', "unknown escape"),
    (b'"\\u12g4"', "four hexadecimal digits"),
    (b'"\\u12', "four hexadecimal digits"),
    (b'"\\ud800"', "lone surrogate"),
    (b'"\\ud800\\u0041"', "lone surrogate"),
    (b'"\\ud800\\ud800"', "lone surrogate"),
    (b'"\\udc00"', "lone surrogate"),
    (b'"\xed\xa0\x80"', "ill-formed UTF-8"),
    (b'"\xc0\xaf"', "ill-formed UTF-8"),
    (b'"\xf4\x90\x80\x80"', "ill-formed UTF-8"),
    (b'"\xe2\x82"', "ill-formed UTF-8"),
    (b'"\xff"', "byte 1: ill-formed UTF-8"),
    (b"NaN", "not a JSON value"),
    (b"Infinity", "not a JSON value"),
    (b"-Infinity", "a digit is missing"),
    (b"nul", "not a JSON value"),
    (b"True", "not a JSON value"),
    (b"'a'", "not a JSON value"),
    (b"+1", "not a JSON value"),
    (b".5", "not a JSON value"),
    (b"-", "a digit is missing"),
    (b"1.", "a digit is missing"),
    (b"1e", "a digit is missing"),
    (b"1e+", "a digit is missing"),
    (b"01", "leading zero"),
    (b"-01", "leading zero"),
    (b"00.5", "leading zero"),
    (b"0x10", "something follows"),
    (b"9223372036854775808", "does not fit in 64 bits"),
    (b"-9223372036854775809", "does not fit in 64 bits"),
    (b"1" + b"0" * 400, "does not fit in 64 bits"),
    (b"0.30000000000000004", "hexadecimal float"),
    (b"1.234567890123456", "hexadecimal float"),
    (b"1e23", "hexadecimal float"),
    (b"1e-23", "hexadecimal float"),
    (b"1e999999999999999999999", "hexadecimal float"),
    (b"1e-999999999999999999999", "hexadecimal float"),
    (b"[" * 17 + b"]" * 17, "byte 16: nested deeper than 16"),
    (b"[" * 100000, "byte 16: nested deeper than 16"),
    (b'{"a":' * 100000, "nested deeper than 16"),
])
def test_refusals_say_where(reader: Reader, text: bytes, says: str) -> None:
    with pytest.raises(Refused) as caught:
        reader.parse(text)
    assert str(caught.value).startswith("test.json: byte ")
    assert says in str(caught.value)


@pytest.mark.parametrize("text", [
    b"9223372036854775807", b"-9223372036854775808", b"-0", b"0", b"-0.0", b"0e5", b"0.000",
    b"1.0", b"123456789012345.0", b"1e22", b"1E+22", b"1e-22", b"1.5e10", b"1000000000000000000.0",
    b"0.0001", b"999999999999999e22", b"999999999999999e-22", b"1e00000000000000000000000000000002",
    b"1" + b".0" + b"0" * 1000, b" [ ] ", b"{ }", b"\t\r\n{\"a\" : [ 1 , 2 ] }\n",
    b"[" * 16 + b"]" * 16, b'""', b'{"":0}',
])
def test_accepted_as_by_python(reader: Reader, text: bytes) -> None:
    assert same(reader.parse(text), json.loads(text))


@settings(max_examples=300, deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_hex_floats_are_exact(reader: Reader, value: float) -> None:
    for text in (value.hex(), value.hex().upper(), value.hex().replace("0x", "0X")):
        assert same(reader.real_of(json.dumps(text).encode()), value)


@settings(max_examples=300, deadline=None)
@given(mantissa=st.integers(0, 2**80), point=st.integers(0, 20), power=st.integers(-1200, 1100))
def test_hex_floats_are_refused_when_not_exact(reader: Reader, mantissa: int, point: int,
                                               power: int) -> None:
    digits = f"{mantissa:x}".rjust(point + 1, "0")
    text = f"0x{digits[:len(digits) - point]}.{digits[len(digits) - point:]}p{power:+d}"
    exact = mantissa * Fraction(2) ** (power - 4 * point)
    try:
        wanted: float | None = float.fromhex(text)
    except OverflowError:
        wanted = None
    if wanted is not None and Fraction(wanted) != exact:
        wanted = None
    assert same(reader.real_of(json.dumps(text).encode()), wanted)


@pytest.mark.parametrize("text", [
    "", "0x", "0x1", "0x1.8", "1.5", "0x.p1", "0xp1", "0x1p", "0x1p+", "0x1p1 ", " 0x1p1", "0x1q1",
    "0x1p1.5", "inf", "nan", "0x1p1024", "-0x1p99999999999999999999", "0x1p-1075", "0x1g.0p1",
    "0x1.00000000000008p0", "--0x1p1", "0x1p1\0",
])
def test_not_a_hex_float(reader: Reader, text: str) -> None:
    assert reader.real_of(json.dumps(text).encode()) is None


def test_integers_read_as_reals_only_when_exact(reader: Reader) -> None:
    assert reader.real_of(b"9007199254740992") == 2.0**53
    assert reader.real_of(b"9007199254740993") is None
    assert reader.real_of(b"true") is None


def test_reals_do_not_depend_on_the_rounding_mode(lib, reader: Reader) -> None:
    _, C = lib
    texts_ = [b"0.1", b"1.1e-7", b"3.3e15", b"123456789.123"]
    wanted = [float(t) for t in texts_]
    before = C.float_mode_enter()
    try:
        for upward in (0x5F80, 0x3F80) if before & 0x1F80 else (1 << 22, 1 << 23):
            C.float_mode_leave(upward)
            assert [reader.real_of(t) for t in texts_] == wanted
    finally:
        C.float_mode_leave(before)


def test_limits_do_not_cost_time(reader: Reader, lib) -> None:
    ffi, C = lib
    out, err = ffi.new("struct json_doc **"), ffi.new("hr_error *")
    start = time.process_time()

    many = b"[" + b"1," * 4194303 + b"1]"
    assert C.json_parse(many, len(many), b"t", out, err) == C.HR_ERR_FORMAT
    assert b"4194304 values" in ffi.string(err.detail)
    brackets = b'"' + b"[" * 5_000_000 + b'"'
    assert C.json_parse(brackets, len(brackets), b"t", out, err) == C.HR_OK
    C.json_free(out[0])

    keys = [f"{'k' * 30}{i:06d}" for i in range(100_000)]
    for order in (keys, keys[::-1]):
        text = json.dumps(dict.fromkeys(order, 1)).encode()
        assert C.json_parse(text, len(text), b"t", out, err) == C.HR_OK
        root = C.json_root(out[0])
        assert C.json_len(root) == len(keys)
        assert all(C.json_get(root, k.encode()) == C.json_value_at(root, i)
                   for i, k in enumerate(order[::997]) for i in [i * 997])
        assert C.json_get(root, b"kk") == ffi.NULL
        C.json_free(out[0])
    assert time.process_time() - start < 20


def test_accessors_take_null_and_other_kinds(lib) -> None:
    ffi, C = lib
    null, size = ffi.NULL, ffi.new("size_t *")
    out, err = ffi.new("struct json_doc **"), ffi.new("hr_error *")
    assert C.json_parse(b"[1]", 3, b"t", out, err) == C.HR_OK
    for v in (null, C.json_at(C.json_root(out[0]), 0)):
        assert C.json_get(v, b"a") == null and C.json_len(v) == 0 and C.json_at(v, 0) == null
        assert C.json_key_at(v, 0) == null and C.json_value_at(v, 0) == null
        assert C.json_string(v, size) == null and not C.json_bool(v, ffi.new("bool *"))
    root = C.json_root(out[0])
    assert C.json_at(root, 1) == null and C.json_get(root, b"a") == null
    assert not C.json_int(null, ffi.new("int64_t *"))
    assert not C.json_real(null, ffi.new("double *"))
    assert C.json_kind(null) == C.JSON_NULL and C.json_root(null) == null
    C.json_free(out[0])
    C.json_free(null)


class TestNeed:
    """json_need_*: the error names the place, the key, the value and the range."""

    TEXT = (b'{"n":5,"big":9007199254740993,"x":1.5,"h":"0x1.8p-3","bad":"0.1","t":true,'
            b'"s":"abc","z":"a\\u0000b","l":[1],"o":{}}')

    @pytest.fixture()
    def call(self, lib):
        ffi, C = lib
        out, err = ffi.new("struct json_doc **"), ffi.new("hr_error *")
        assert C.json_parse(self.TEXT, len(self.TEXT), b"t", out, err) == C.HR_OK
        root = C.json_root(out[0])

        def run(what: str, key: bytes, ctype: str, *limits: Any, of: Any = None) -> Any:
            target = ffi.new(ctype)
            status = getattr(C, what)(root if of is None else of, key, *limits, b"layer 3",
                                      target, err)
            if status != C.HR_OK:
                assert status == C.HR_ERR_FORMAT
                raise Refused(ffi.string(err.detail).decode())
            return target[0]

        yield run
        C.json_free(out[0])

    def test_int(self, call) -> None:
        assert call("json_need_int", b"n", "int64_t *", 5, 5) == 5
        for key, low, high, says in [
            (b"n", 6, 10, 'layer 3: "n" is 5, must be from 6 to 10'),
            (b"n", 0, 4, 'layer 3: "n" is 5, must be from 0 to 4'),
            (b"x", 0, 9, 'layer 3: "x" is a real, must be an integer'),
            (b"q", 0, 9, 'layer 3: "q" is missing'),
        ]:
            with pytest.raises(Refused, match=says):
                call("json_need_int", key, "int64_t *", low, high)

    def test_real(self, call) -> None:
        assert call("json_need_real", b"h", "double *", 0.0, 1.0) == 0.1875
        assert call("json_need_real", b"n", "double *", 0.0, 5.0) == 5.0
        for key, says in [(b"x", "is 1.5, must be from 0 to 1"), (b"bad", "hexadecimal float"),
                          (b"big", "within 2.53"), (b"t", "is true or false, must be a number")]:
            with pytest.raises(Refused, match=says):
                call("json_need_real", key, "double *", 0.0, 1.0)

    def test_string_bool_kind(self, call, lib) -> None:
        ffi, C = lib
        assert ffi.string(call("json_need_string", b"s", "const char **")) == b"abc"
        assert call("json_need_bool", b"t", "bool *") is True
        assert C.json_len(call("json_need", b"l", "const struct json **", C.JSON_ARRAY)) == 1
        with pytest.raises(Refused, match="NUL"):
            call("json_need_string", b"z", "const char **")
        with pytest.raises(Refused, match="must be true or false"):
            call("json_need_bool", b"n", "bool *")
        with pytest.raises(Refused, match="is an array, must be an object"):
            call("json_need", b"l", "const struct json **", C.JSON_OBJECT)
        with pytest.raises(Refused, match="layer 3: is missing, must be an object"):
            call("json_need", b"l", "const struct json **", C.JSON_OBJECT, of=ffi.NULL)

    def test_only_keys(self, lib) -> None:
        ffi, C = lib
        out, err = ffi.new("struct json_doc **"), ffi.new("hr_error *")
        text = b'{"a":1,"b\\n":2}'
        assert C.json_parse(text, len(text), b"t", out, err) == C.HR_OK
        root = C.json_root(out[0])
        names = [ffi.new("char[]", k) for k in (b"a", b"b\n", b"ab")]
        known = ffi.new("const char *[]", [*names, ffi.NULL])
        fewer = ffi.new("const char *[]", [names[0], ffi.NULL])
        assert C.json_only_keys(root, known, b"here", err) == C.HR_OK
        assert C.json_only_keys(root, fewer, b"here", err) == C.HR_ERR_FORMAT
        assert ffi.string(err.detail) == b'here: the key "b?" is not understood by this version'
        C.json_free(out[0])
