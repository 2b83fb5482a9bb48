"""Cases of docs/cases.md about text: characters, control tokens, endings. The model says what it is
told to (scripted_model.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scripted_model
import tokenizers
from case_helpers import run
from headrace_tools.convert.tokenizer import compile_tokenizer
from scripted_model import ADDED, SPECIAL, VOCABULARY, successors
from support.text import CoreTokenizer

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "tokenizers"
BUNDLED = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3.5-moe"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory, headrace):
    """Callable: name, chains of tokens, stop ids -> an opened model and its container."""
    made: dict[str, tuple] = {}

    def make(name: str, *chains, stop_ids: tuple[int, ...] = (), max_position: int = 512):
        if name not in made:
            path = scripted_model.make(tmp_path_factory.mktemp("scripted") / name, successors(*chains),
                                       stop_ids, max_position)
            made[name] = headrace.Model(path, threads=1, ctx=min(256, max_position)), path
        return made[name]

    yield make
    for model, _ in made.values():
        model.close()


# ---- characters ----

EMOJI = "😀é€".encode()  # four, two and three bytes; every byte is a token, no byte occurs twice
assert len(set(EMOJI)) == len(EMOJI)


def test_b35_characters_split_over_tokens(scripted):
    """Bytes come with every token, text when a character is complete; the pieces are the whole."""
    model, _ = scripted("emoji", b"!" + EMOJI + b".", b"..")
    seen = []
    made = model.generate("!", max_tokens=len(EMOJI) + 1, on_token=seen.append)
    assert b"".join(t.bytes for t in seen) == EMOJI + b"."
    assert [t.text for t in seen] == ["", "", "", "😀", "", "é", "", "", "€", "."]
    assert made.text == "😀é€." == model.detokenize(made.ids)


@pytest.mark.parametrize("tokens", range(1, len(EMOJI)))
def test_b35_generation_that_ends_within_a_character(scripted, tokens):
    """The tail is flushed as a replacement; nothing is lost, nothing is invented."""
    model, _ = scripted("emoji", b"!" + EMOJI + b".", b"..")
    pieces = []
    made = model.generate("!", max_tokens=tokens, on_token=lambda t: pieces.append(t.text))
    want = EMOJI[:tokens].decode(errors="replace")
    assert "".join(pieces) == made.text == want
    assert model.detokenize_bytes(made.ids) == EMOJI[:tokens]


def test_b35_a_lone_byte_does_not_stall_the_stream(scripted):
    model, _ = scripted("lone", b"!\xffab\x80c", b"cc")
    seen = []
    made = model.generate("!", max_tokens=5, on_token=seen.append)
    assert [t.text for t in seen] == ["�", "a", "b", "�", "c"]
    assert model.detokenize_bytes(made.ids) == b"\xffab\x80c"


def test_b54_standard_output_is_byte_for_byte(scripted, headrace_bin):
    """No newline is translated, nothing ends at 0x1A, nothing is added where text is piped."""
    raw = bytes([0x0A, 0x0D, 0x1A, 0x09, 0x00, 0x41])
    model, path = scripted("binary", b"!" + raw, b"AA")
    done = run([headrace_bin, "run", path, "-p", "!", "-n", len(raw), "--ctx", "64"])
    assert done.returncode == 0 and done.stdout == raw
    piped = run([headrace_bin, "run", path, "-", "-n", "1", "--ctx", "64", "--json"], input=b"\r\n\x1a\n!")
    assert json.loads(piped.stdout)["prompt_tokens"] == 5
    assert json.loads(piped.stdout)["text"] == "\n"


# ---- control tokens ----


def reference_files() -> list[Path]:
    return [*sorted(p for p in FIXTURES.iterdir() if (p / "tokenizer.json").exists()), BUNDLED]


@pytest.mark.parametrize("folder", reference_files(), ids=lambda p: p.name)
def test_b36_text_never_becomes_a_control_token(lib, folder):
    """Every control token of every vocabulary, alone, in words, doubled, cut and joined."""
    table = compile_tokenizer(folder, 1 << 20)
    opened = CoreTokenizer(lib, table.data)
    try:
        control = set(table.control)
        spellings = {text: i for text, i in table.added.items() if i in control}
        assert spellings
        everything = "".join(spellings)
        texts = [everything, everything[::-1], everything.upper(), "\n".join(spellings)]
        texts += [f"a{s}b {s}{s} {s[:-1]}{s} <{s}> {s[0]}{s}" for s in spellings]
        for text in texts:
            ids = opened.encode(text)
            assert not set(ids) & control
            assert opened.decode(ids) == text.encode()
        for spelling, number in spellings.items():
            assert opened.encode(f"abc{spelling}def", special=True).count(number) == 1
    finally:
        opened.close()


def test_b36_the_public_calls_keep_to_it(scripted, headrace_bin):
    model, path = scripted("emoji", b"!" + EMOJI + b".", b"..")
    text = "".join(SPECIAL) + ADDED
    assert all(i < 256 for i in model.tokenize(text))
    assert model.tokenize(text, special=True) == [*range(256, 256 + len(SPECIAL)), VOCABULARY - 1]
    assert model.detokenize(model.tokenize(text, special=True)) == text
    for extra, count in (([], len(text)), (["--special"], len(SPECIAL) + 1)):
        done = run([headrace_bin, "run", path, "-p", text, "-n", "1", "--ctx", "128", "--json", *extra])
        assert json.loads(done.stdout)["prompt_tokens"] == count


@pytest.mark.parametrize("folder", reference_files(), ids=lambda p: p.name)
def test_b37_marked_up_text_is_that_of_the_reference(lib, folder):
    """Control tokens in the middle of words, of any shape; every id has its bytes."""
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    table = compile_tokenizer(folder, 1 << 20)
    opened = CoreTokenizer(lib, table.data)
    try:
        for spelling in table.added:
            for text in (f"abc{spelling}def", f" {spelling} ", f"{spelling}{spelling}x", f"é{spelling}\n"):
                assert opened.encode(text, special=True) == reference.encode(text, add_special_tokens=False).ids
        for number in range(opened.core.tokenizer_vocab(opened.handle)):
            if reference.id_to_token(number) is not None:
                assert opened.token(number)
    finally:
        opened.close()


EDGES = (
    [f"x{'1234567890123'[:n]} {'9' * n}" for n in range(1, 13)]
    + [" a", "a ", "  a   b    c  ", "\ta\t\tb", "a\r\nb\n\r\nc\r", "a\u2029b\u2028c", "½ ⅔ ²³", "中文字符 日本語 한국어",
       "👩‍👩‍👧‍👦 👍🏽 🇨🇿", "e\u0301 a\u0308\u0323 \u0915\u093c", "a\x00b\x00", "don't DON'T it'S", "\u00a0x\u3000y",
       "\u0130i\u0131", "x\ufeffy", "…—‘’", "\U0010ffff"]
)


@pytest.mark.parametrize("folder", reference_files(), ids=lambda p: p.name)
def test_b38_edges_of_the_pre_tokenizer(lib, folder):
    """Ids equal to the reference's on what pre-tokenizers disagree about."""
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    table = compile_tokenizer(folder, 1 << 20)
    opened = CoreTokenizer(lib, table.data)
    try:
        for text in (*EDGES, "".join(EDGES)):
            assert opened.encode(text) == [
                i for i in reference.encode(text, add_special_tokens=False).ids if i not in table.control], repr(text)
        long = "a" * 100_000
        assert opened.decode(opened.encode(long)) == long.encode()
        assert opened.encode(b"a\xed\xa0\x80b") == opened.encode("a\ufffd\ufffd\ufffdb")
    finally:
        opened.close()


# ---- endings ----


def test_b40_exactly_the_configured_ids_end_it(scripted):
    """Three ids end it, each of them; a role marker that is none of them does not."""
    stops = (256, 258, ord("."))
    chain = [ord("a"), 259, ord("b"), 260, ord("c"), 257, ord("d"), 256]
    model, _ = scripted("stops", chain, [ord("e"), 258], [ord("f"), ord(".")], b"gh", b"hg", stop_ids=stops)
    made = model.generate("a", max_tokens=50)
    assert (made.finish_reason, made.stop_id, made.ids) == ("stop", 256, chain[1:-1])
    assert (model.generate("e", max_tokens=50).stop_id, model.generate("f", max_tokens=50).stop_id) == (258, ord("."))
    endless = model.generate("g", max_tokens=50)
    assert (endless.finish_reason, len(endless.ids)) == ("length", 50)
    assert model.generate("a", max_tokens=20, ignore_stop_ids=True).finish_reason == "length"


def test_b40_every_ending_has_its_name(scripted, headrace):
    model, _ = scripted("short", b"ab", b"ba", max_position=32)
    assert model.generate("a", max_tokens=5).finish_reason == "length"
    assert model.generate("a", max_tokens=5, stop=["aba"]).finish_reason == "stop"
    assert model.generate("a", max_tokens=5, on_token=lambda t: False).finish_reason == "cancelled"
    assert model.generate("a" * 20, max_tokens=500).finish_reason == "context"


@pytest.mark.parametrize("tokens, fits", [(31, True), (32, True), (33, False), (320, False)])
def test_b41_prompts_around_the_context(scripted, headrace, headrace_bin, tokens, fits):
    """Refused before anything is evaluated, with both counts; the end within an answer has its reason."""
    model, path = scripted("short", b"ab", b"ba", max_position=32)
    model.generate("a", max_tokens=2)
    before, position = model.stats.tokens_prefilled, model.position
    if fits:
        made = model.generate("a" * tokens, max_tokens=100)
        assert made.finish_reason == "context" and len(made.ids) <= 33 - tokens
        return
    with pytest.raises(headrace.ContextError, match=f"{tokens}.* 32"):
        model.generate("a" * tokens, max_tokens=1)
    assert (model.stats.tokens_prefilled, model.position) == (before, position)
    done = run([headrace_bin, "run", path, "-p", "a" * tokens, "-n", "1", "--ctx", "32"])
    assert done.returncode == 2 and str(tokens).encode() in done.stderr and b"32" in done.stderr


def test_b44_a_cycle_of_two_tokens(scripted):
    """Only max_tokens, a stop string or the context ends it; no guard cuts an answer unasked."""
    model, _ = scripted("short", b"ab", b"ba", max_position=32)
    made = model.generate("a", max_tokens=24)
    assert made.text == "ba" * 12 and made.finish_reason == "length"
