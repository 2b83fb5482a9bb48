"""Compiled split programs against the regular expressions of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from headrace_tools.convert import regex_compile, regex_parse, unicode_data, unicode_tables
from headrace_tools.convert.regex_parse import RegexError

SETTINGS = settings(max_examples=60, deadline=None)
TELLING = " \t\n\r'sStTkKlLdD019abzAZ.,-{}]\u00e9\u017f\u212a\u0301\u4e00\u2028\U0001F600\u0660"
PATTERNS = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"a|ab|abz", r"(?:ab?)+z", r"(?:a|ab)(?:bz|z)?", r"a*?b", r"[a-z]+?(?=z)", r"(?i:k|[a-z])+",
    r"(?i:[^s])", r"[^\S\n]+", r"[\s\S]", r".", r"a{2}", r"a{1,2}", r"a{2,}", r"a{,2}b", r"{",
    r"a{x}", r"[]a]+", r"[a\-z]+", r"[a-]+", r"[\p{L}&&[^\p{Han}a]]+", r"[[a]b]+", r"\P{L}+",
    r"\p{^L}", r"\d+", r"\D+", r"\s+\z", r"\s+\Z", r"a$", r"\x41|\u0041|\x{1F600}", r"\t\n", r"\.",
    r"[ab]{1,3}+z", r"(?:a{1,2}+b)*z", r"a{2,3}?+b", r"(?:[ab]z?){1,2}+", r"a{1,}+", r"\p{N}{1,3}+|a",
    r"(?!a)[ab]", r"(a)(b)", r"(?:a?b)*z", r"(?-i:a)", r"a++b", r"a?+a", r"\s(?=(?:a|b)+z)",
]


@pytest.fixture(scope="module")
def split(lib):
    """Callable: list of (program, drop) -> callable: text -> pieces by the engine."""
    ffi, core = lib

    def opened(programs: list[tuple[regex_compile.Program, bool]]) -> Callable[[str], list[str]]:
        built = regex_compile.assemble(programs)
        parts = [ffi.new("uint8_t[]", part) if part else ffi.new("uint8_t[1]") for part in (
            built.splits, built.nodes, built.sets, built.class_index, built.class_blocks)]
        sizes = (built.splits, built.nodes, built.sets, built.class_index, built.class_blocks)
        sections = ffi.new("struct section[5]")
        for section, part, source in zip(sections, parts, sizes):
            section.data, section.bytes = part, len(source)
        table, error = ffi.new("struct pretokenizer *"), ffi.new("hr_error *")
        assert core.pretokenizer_init(table, sections, error) == 0, ffi.string(error.detail)

        def run(text: str) -> list[str]:
            pieces: list[str] = []

            @ffi.callback("hr_status(void *, const uint8_t *, size_t, hr_error *)")
            def piece(_user, start, n, _error):
                pieces.append(ffi.buffer(start, n)[:].decode())
                return 0

            raw, _kept = text.encode(), parts  # the table points into the parts
            status = core.pretokenizer_run(table, ffi.NULL, raw, len(raw), piece, ffi.NULL, error)
            assert status == 0
            return pieces

        return run

    return opened


def library_pieces(pattern: str, text: str, drop: bool = False) -> list[str]:
    behaviour = ("removed", True) if drop else ("isolated", False)
    found = pre_tokenizers.Split(Regex(pattern), *behaviour).pre_tokenize_str(text)
    return [piece for piece, _ in found]


def texts() -> st.SearchStrategy[str]:
    return st.text(st.one_of(st.sampled_from(TELLING), st.characters(exclude_categories=["Cs"])),
                   max_size=30)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_library(split, pattern):
    program = regex_compile.compile_tree(regex_parse.parse(pattern))
    engine = {drop: split([(program, drop)]) for drop in (False, True)}

    @SETTINGS
    @given(texts(), st.booleans())
    def check(text: str, drop: bool) -> None:
        assert engine[drop](text) == library_pieces(pattern, text, drop)

    check()


@pytest.mark.parametrize("length", [1, 2045, 2046, 2047, 2048, 2049, 4095, 4096, 4097, 10000])
def test_blocks_do_not_show(split, length):
    pattern = PATTERNS[0]
    pieces = split([(regex_compile.compile_tree(regex_parse.parse(pattern)), False)])
    for text in ("\u4e00" * (length // 3) + " ", " " * length + "\n",
                 "a\u00e9 \U0001F600" * (length // 8), "x" * length,
                 (" " * 50 + "ab1") * (length // 53)):
        assert pieces(text) == library_pieces(pattern, text)


def test_splits_follow_each_other(split):
    first = regex_compile.compile_tree(regex_parse.parse(r"\p{N}{1,3}"))
    second = regex_compile.compile_tree(regex_parse.parse(r"\s+(?!\S)|\s|[a-z]+"))
    text = "abc12345 de  \n 6 f"
    steps = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.Split(Regex(r"\s+(?!\S)|\s|[a-z]+"), "isolated"),
    ])
    wanted = [piece for piece, _ in steps.pre_tokenize_str(text)]
    assert split([(first, False), (second, False)])(text) == wanted


def test_literal_pattern(split):
    program = regex_compile.compile_tree(regex_parse.literal("a.[b"))
    wanted = pre_tokenizers.Split("a.[b", "isolated").pre_tokenize_str("xa.[bya.[bacb")
    assert split([(program, False)])("xa.[bya.[bacb") == [piece for piece, _ in wanted]


@pytest.mark.parametrize("pattern", [
    r"(?<=a)b", r"(?<!a)b", r"(?>a+)b", r"(?<n>a)", r"(a)\1", r"\bword", r"\w+", r"\h", r"\Ka",
    r"\p{Greek}", r"\pL", r"^a", r"\Aa", r"[[:alpha:]]", r"(?i)a", r"(?i:ss)", r"(?i:\u00e9)",
    r"(?i:\p{Lu})", r"a*", r"(a*)*b", r"a{2}?", r"a{1,3}++", r"a{0,3}+", r"a{1,3}+{2}",
    r"a+{1,3}", r"(?:ab)++", r"a{3,1}", r"(a", r"a)",
    r"[a", r"[z-a]", r"\xFF", r"a{1000}", r"(?#c)a", r"(?m:a)", "*a", r"\p{L", r"\x{110000}", "a\\",
])
def test_unsupported_is_refused(pattern):
    with pytest.raises(RegexError):
        regex_compile.compile_tree(regex_parse.parse(pattern))


def test_property_tables_match_library():
    """At every border of every table: the committed data is that of the installed library."""
    edges: set[int] = set(range(0, 0x110000, 1009))
    names = {word[:2] for word in unicode_data.CATEGORIES.split()} - {"Cs"}
    sets = {rf"\p{{{name}}}": unicode_tables.property_set(name) for name in [*names, "Han"]}
    sets[r"\s"] = unicode_tables.white_space()
    for codes in sets.values():
        for start, stop in codes:
            edges.update((start - 1, start, stop - 1, stop))
    sample = sorted(c for c in edges if 0 <= c < 0x110000 and not 0xD800 <= c < 0xE000)
    text = "".join(map(chr, sample))
    for pattern, codes in sets.items():
        inside = {c for start, stop in codes for c in range(start, stop)}
        found = library_pieces(pattern, text, drop=True)
        assert sorted(map(ord, found)) == [c for c in sample if c in inside], pattern


@pytest.mark.parametrize(("codes", "part"), [
    (unicode_tables.numeric(), pre_tokenizers.Digits(individual_digits=True)),
    (unicode_tables.punctuation(), pre_tokenizers.Punctuation()),
])
def test_digits_and_punctuation_tables_match_library(codes, part):
    inside = {c for start, stop in codes for c in range(start, stop)}
    sample = [c for c in range(0x30000) if not 0xD800 <= c < 0xE000 and c != ord("a")]
    found = part.pre_tokenize_str("".join(f"{chr(c)}a" for c in sample))
    alone = {ord(piece) for piece, _ in found if len(piece) == 1 and piece != "a"}
    assert alone == inside
