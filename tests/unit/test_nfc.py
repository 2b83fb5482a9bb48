"""Normalisation tables and code against the `tokenizers` library."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from headrace_tools.convert import unicode_tables


@pytest.fixture(scope="module")
def normalise(lib):
    """Callable: text -> (the engine takes it for stable, its normalised form)."""
    ffi, core = lib
    parts = unicode_tables.normalisation()
    kept = [ffi.new("uint8_t[]", part) for part in parts]
    sections = ffi.new("struct section[5]")
    for section, memory, part in zip(sections, kept, parts):
        section.data, section.bytes = memory, len(part)
    table, error = ffi.new("struct nfc *"), ffi.new("hr_error *")
    assert core.nfc_init(table, sections, error) == 0, ffi.string(error.detail)

    def run(text: str) -> tuple[bool, str]:
        raw = text.encode()
        out, capacity, length = (ffi.new("uint8_t **"), ffi.new("size_t *"), ffi.new("size_t *"))
        assert core.nfc_normalise(table, ffi.NULL, raw, len(raw), out, capacity, length, error) == 0
        assert length[0] <= capacity[0]
        result = ffi.buffer(out[0], length[0])[:].decode()
        core.mem_free(ffi.NULL, out[0], capacity[0])
        return bool(core.nfc_is_stable(table, raw, len(raw))), result

    yield run
    del kept


def scalars() -> list[int]:
    return [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def test_every_code_point(normalise):
    nfc = normalizers.NFC()
    text = "\n".join(map(chr, scalars()))
    assert normalise(text)[1] == nfc.normalize_str(text)


def test_decompositions_match_library():
    nfd = normalizers.NFD()
    full = unicode_tables.decompositions()
    for code in scalars():
        if not 0xAC00 <= code < 0xD7A4:
            parts = "".join(map(chr, full.get(code, (code,))))
            assert nfd.normalize_str(chr(code)) == parts, hex(code)


def test_order_of_every_mark(normalise):
    """Each mark between one mark of every class, in both orders."""
    nfc = normalizers.NFC()
    classes = unicode_tables.combining_classes()
    ladder = "".join(map(chr, {k: c for c, k in classes.items()}.values()))
    for mark in classes:
        text = f"\n{chr(mark)}{ladder}\n{ladder}{chr(mark)}{ladder[::-1]}"
        assert normalise(text)[1] == nfc.normalize_str(text), hex(mark)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_sequences(normalise, data):
    marks = sorted(unicode_tables.combining_classes())
    moving = sorted(unicode_tables.unstable() | set(unicode_tables.decompositions()))
    firsts = sorted({first for first, _ in unicode_tables.compositions()})
    code = st.one_of(
        st.sampled_from(marks), st.sampled_from(moving), st.sampled_from(firsts),
        st.integers(0x1100, 0x11FF), st.integers(0xAC00, 0xAC80), st.integers(0x20, 0x7E),
    )
    text = "".join(map(chr, data.draw(st.lists(code, max_size=60))))
    wanted = normalizers.NFC().normalize_str(text)
    stable, result = normalise(text)
    assert result == wanted
    assert not stable or text == wanted
