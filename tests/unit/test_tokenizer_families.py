"""Pre-tokenizers of common model families, on a small vocabulary, against `tokenizers`."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_tools.convert import unicode_tables
from headrace_tools.convert.errors import ConvertError
from headrace_tools.convert.tokenizer import compile_tokenizer
from support.text import CoreTokenizer

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "tests" / "fixtures" / "tokenizers" / "o200k" / "tokenizer.json"
TELLING = (
    " \t\n\r'sStTlLdDmMrReEvV0123456789abzAZ.,!/-_<|>$+^`~\u00e9\u00b5\u01c5\u017f\u212a\u02b0"
    "\u0301\u4e00\u9fa6\u0800\u30ab\uac00\uff11\uff0c\u3002\u2018\u2028\u00a0\u00bd\u2167\u0660"
    "\U00016ff4\U00011de0\U0001F600"
)


def split(pattern: str, behaviour: str = "Isolated", invert: bool = False) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behaviour,
            "invert": invert}


def byte_level(use_regex: bool) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": use_regex}


def letters() -> str:
    """A long class of cased letters, written out as literal ranges."""
    out = ""
    for name in ("Lu", "Ll", "Lt"):
        for start, stop in unicode_tables.property_set(name):
            out += chr(start) if stop - start == 1 else f"{chr(start)}-{chr(stop - 1)}"
    return out


GPT4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT4_NEW = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
            r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s")
QWEN = GPT4.replace("{1,3}", "")
DIGITS = {"type": "Digits", "individual_digits": True}
FAMILIES = {
    "gpt2": ([byte_level(True)], None, False),
    "gpt-neox": ([byte_level(True)], "NFC", False),
    "starcoder": ([DIGITS, byte_level(True)], None, False),
    "gpt4": ([split(GPT4), byte_level(False)], None, True),
    "gpt4-new": ([split(GPT4_NEW), byte_level(False)], None, False),
    "qwen": ([split(QWEN), byte_level(False)], "NFC", False),
    "removed": ([split(GPT4, "Removed", True), byte_level(False)], None, False),
    "deepseek-llm": ([
        split("[\r\n]"),
        split(rf"\s?[{letters()}]+"),
        split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        split(r"\s+$"),
        split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        DIGITS,
        byte_level(False),
    ], None, False),
    "bloom": ([split(r" ?[^(\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"),
               byte_level(False)], None, False),
    "digit runs": ([{"type": "Digits", "individual_digits": False}, byte_level(True)], None, True),
    "punctuation": ([{"type": "Punctuation", "behavior": "Isolated"}, byte_level(False)],
                    None, False),
    "punctuation runs": ([{"type": "Punctuation", "behavior": "Contiguous"},
                          {"type": "Split", "pattern": {"String": "ab"}, "behavior": "Isolated",
                           "invert": False}, byte_level(True)], None, False),
}


def family_spec(name: str) -> dict:
    parts, normaliser, ignore_merges = FAMILIES[name]
    spec = json.loads(BASE.read_text(encoding="utf-8"))
    spec["normalizer"] = {"type": normaliser} if normaliser else None
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    if len(parts) == 1:
        spec["pre_tokenizer"] = parts[0]
    spec["post_processor"] = None
    spec["added_tokens"] = []
    spec["model"]["ignore_merges"] = ignore_merges
    spec["model"]["unk_token"] = "!"
    return spec


def opened(lib, folder: Path, spec: dict) -> tuple[CoreTokenizer, tokenizers.Tokenizer]:
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    build = compile_tokenizer(folder, 1 << 20)
    return CoreTokenizer(lib, build.data), tokenizers.Tokenizer.from_str(json.dumps(spec))


@pytest.fixture(scope="module")
def pairs(lib, tmp_path_factory):
    """name -> (engine, library)."""
    out = {name: opened(lib, tmp_path_factory.mktemp("family"), family_spec(name))
           for name in FAMILIES}
    yield out
    for engine, _ in out.values():
        engine.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_random_text(pairs, name):
    engine, reference = pairs[name]

    @settings(max_examples=120, deadline=None)
    @given(st.lists(st.one_of(st.text(st.sampled_from(TELLING), max_size=20), st.text(
        st.characters(exclude_categories=["Cs"]), max_size=12)), max_size=4).map("".join))
    def check(text: str) -> None:
        assert engine.encode(text) == reference.encode(text).ids

    check()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_code_point(pairs, name):
    engine, reference = pairs[name]
    text = "".join(f"{chr(c)}a" for c in range(0x20, 0x30000, 5)
                   if not 0xD800 <= c < 0xE000)
    for start in range(0, len(text), 30000):
        part = text[start : start + 30000]
        assert engine.encode(part) == reference.encode(part).ids, hex(start)


@pytest.mark.parametrize("unit", ["a", " ", "\n", "1", ".", "\u4e00", " a", "x \n"])
def test_long_runs_take_linear_time(pairs, unit):
    for name in ("gpt2", "deepseek-llm", "gpt4-new"):
        text = unit * (50_000 // len(unit.encode()))
        start = time.thread_time()
        ids = pairs[name][0].encode(text)
        assert time.thread_time() - start < 3.0  # a quadratic walk takes far longer
        assert pairs[name][0].decode(ids) == text.encode()


def test_blanks_as_added_tokens_are_found_in_any_text(lib, tmp_path):
    """GPT-NeoX and OLMoE: runs of blanks are added tokens, but not special."""
    spec = family_spec("gpt-neox")
    names = ["  ", "   ", "     ", "\n\n", "<x>", "<s>"]
    first = max(spec["model"]["vocab"].values()) + 1
    spec["added_tokens"] = [
        {"id": first + i, "content": name, "special": name == "<s>", "normalized": name != "<s>",
         "single_word": False, "lstrip": False, "rstrip": False} for i, name in enumerate(names)]
    engine, reference = opened(lib, tmp_path, spec)
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"].isspace()]
    plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
    chance = random.Random(7)
    with engine:
        for _ in range(300):
            text = "".join(chance.choices([" ", "\n", "a", "<x>", "<s>", "e\u0301"], k=24))
            assert engine.encode(text, special=True) == reference.encode(text).ids
            assert engine.encode(text) == plain.encode(text).ids
        assert not engine.core.tokenizer_is_control(engine.handle, first)


def test_sentencepiece_style_is_refused_by_name(tmp_path):
    spec = family_spec("gpt2")
    spec["model"]["byte_fallback"] = True
    spec["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"}]}
    spec["pre_tokenizer"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConvertError, match="byte_fallback"):
        compile_tokenizer(tmp_path, 1 << 20)
