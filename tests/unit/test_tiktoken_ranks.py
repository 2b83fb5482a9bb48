"""Rank files (tiktoken.model) against the `tiktoken` library and the fixture corpus."""

from __future__ import annotations

import base64
import json
import random
import shutil
import time
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_tools.convert import tiktoken_ranks
from headrace_tools.convert.errors import ConvertError
from headrace_tools.convert.tokenizer import compile_tokenizer
from support.text import CoreTokenizer

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "tokenizers" / "kimi"
CONFIG = {"tokenizer_class": "TikTokenTokenizer"}
BYTES = [bytes([byte]) for byte in range(256)]
TELLING = " \t\n\r'sStTlLdDmMrReEvV019abzAZ.,/-{}\u00e9\u017f\u212a\u01c5\u02b0\u0301\u4e00\u3007" \
          "\u3005\u30ab\u2028\u00a0\U0001F600\u0660\u00bd\uac00\u0e01\U00020000"


def write_ranks(folder: Path, tokens: list[bytes], config: dict) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def library(folder: Path, pattern: str, added: dict[str, int]) -> tiktoken.Encoding:
    ranks = {}
    for line in (folder / "tiktoken.model").read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=added)


@pytest.fixture(scope="module")
def build():
    return compile_tokenizer(FIXTURE, 1119)


@pytest.fixture(scope="module")
def core(lib, build):
    with CoreTokenizer(lib, build.data, vocab_size=1119) as tokenizer:
        yield tokenizer


@pytest.fixture(scope="module")
def reference(build):
    pattern = json.loads((FIXTURE / "info.json").read_text())["regex"]
    return library(FIXTURE, pattern, build.added)


def test_pattern_is_that_of_the_fixture():
    assert tiktoken_ranks.PATTERN == json.loads((FIXTURE / "info.json").read_text())["regex"]


def test_corpus(core):
    cases = [json.loads(line) for line in (FIXTURE / "cases.jsonl").open()]
    assert len(cases) == 625
    ill_formed = 0
    for case in cases:
        if case["cat"] == "decode":
            assert core.decode(case["ids"]).hex() == case["decode_hex"], case["n"]
            continue
        raw = bytes.fromhex(case["hex"])
        if case["cat"] == "invalid_utf8":
            # The rows give the ids of the bytes themselves; hr_tokenize encodes U+FFFD instead.
            assert core.encode(raw) == core.encode(raw.decode("utf-8", "replace"))
            assert core.decode(case["ids"]) == raw
            ill_formed += 1
            continue
        assert core.encode(raw, special=True) == case["ids"], case
        plain = core.encode(raw)
        assert plain == case.get("ids_plain", case["ids"]), case
        assert core.decode(plain) == raw
    assert ill_formed == 9


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_random_text(core, reference, build, data):
    words = st.one_of(
        st.text(st.sampled_from(TELLING), max_size=12),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.sampled_from(sorted(build.added)),
        st.sampled_from(["internationalization", " whole-piece", "\u4e2d\u6587", "'ll", "\r\n "]),
    )
    text = "".join(data.draw(st.lists(words, max_size=6)))
    assert core.encode(text, special=True) == reference.encode(text, allowed_special="all")
    assert core.encode(text) == reference.encode(text, disallowed_special=())


def test_pieces_that_no_merge_reaches(core, reference):
    """The last three ranks of the fixture; as part of a longer piece they are not found."""
    for number, text in ((860, "internationalization"), (861, " whole-piece"),
                         (862, "\u4eba\u5de5\u795e\u7ecf\u7f51\u7edc")):
        assert reference.decode([number]) == text
        for part in (text, f"{text} {text}", f"{text}s", f"x{text}", f"{text}\u4eba"):
            assert core.encode(part) == reference.encode(part), part
    assert core.encode("internationalization") == [860]


def test_every_code_point(core, reference):
    text = "".join(f"{chr(c)}a" for c in range(0x20, 0x32500) if not 0xD800 <= c < 0xE000)
    for start in range(0, len(text), 20000):
        part = text[start : start + 20000]
        assert core.encode(part) == reference.encode(part, disallowed_special=()), hex(start)


def test_entries(core, build, reference):
    assert core.core.tokenizer_vocab(core.handle) == 1119
    for number in range(1119):
        assert core.token(number) == reference.decode_single_token_bytes(number)
        assert core.core.tokenizer_is_control(core.handle, number) == (number >= 863)
    assert len(build.added) == 256 and build.added["<|reserved_token_868|>"] == 868
    assert build.named == {"bos_token": 863, "eos_token": 865, "pad_token": 1118}
    assert build.control == list(range(863, 1119))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab", min_size=2, max_size=7), max_size=40, unique=True), st.randoms(),
       st.lists(st.text("abc", max_size=200), min_size=1, max_size=3))
def test_any_ranks(lib, tmp_path_factory, words, chance, texts):
    """Strings that no merge reaches, bytes of high rank, runs with many equal pairs."""
    folder = tmp_path_factory.mktemp("ranks")
    tokens = BYTES + [word.encode() for word in words]
    chance.shuffle(tokens)
    write_ranks(folder, tokens, CONFIG)
    wanted = library(folder, tiktoken_ranks.PATTERN, {})
    with CoreTokenizer(lib, compile_tokenizer(folder, 1000).data) as tokenizer:
        for text in [*texts, *words, "a" * 700, "ab" * 300]:
            assert tokenizer.encode(text) == wanted.encode(text)


@pytest.mark.parametrize("unit", ["a", "A", " ", "\n", "1", ".", "\u4e00", "\u0301", "aA",
                                  "\u30ab"])
def test_long_runs_take_linear_time(core, reference, unit):
    text = unit * (100_000 // len(unit.encode()))
    start = time.thread_time()
    ids = core.encode(text)
    assert time.thread_time() - start < 3.0  # a quadratic walk takes far longer
    part = unit * 2000
    assert core.encode(part) == reference.encode(part)
    assert core.decode(ids) == text.encode()


def test_real_size(lib, tmp_path):
    """163,584 ranks: parts of a text and random bytes, most of them out of reach of merges."""
    text = (ROOT / "models" / "val.txt").read_bytes()[:400_000]
    chance = random.Random(3)
    tokens = dict.fromkeys(BYTES)
    while len(tokens) < 163_584:
        at, length = chance.randrange(len(text)), chance.choice((2, 2, 3, 3, 4, 5, 6, 8, 12, 40))
        tokens[text[at : at + length]] = None
        if len(tokens) % 3 == 0:
            tokens[chance.randbytes(chance.choice((2, 3, 6)))] = None
    write_ranks(tmp_path, list(tokens)[:163_584], CONFIG)
    start = time.thread_time()
    build = compile_tokenizer(tmp_path, 163_840)
    assert time.thread_time() - start < 30
    wanted = library(tmp_path, tiktoken_ranks.PATTERN, build.added)
    part = text[:100_000].decode("utf-8", "ignore")
    with CoreTokenizer(lib, build.data, vocab_size=163_840) as tokenizer:
        assert tokenizer.encode(part) == wanted.encode(part)


def test_names_and_flags_come_from_the_config(lib, tmp_path):
    config = dict(CONFIG, added_tokens_decoder={
        "258": {"content": "<think>", "special": False, "normalized": True},
        "256": {"content": "[A]", "special": True}})
    write_ranks(tmp_path, BYTES, config)
    build = compile_tokenizer(tmp_path, 512)
    assert 256 in build.control and 258 not in build.control and 257 in build.control
    with CoreTokenizer(lib, build.data) as tokenizer:
        text = "<think>[A]<|reserved_token_257|>"
        assert tokenizer.encode(text, special=True) == [258, 256, 257]
        assert max(tokenizer.encode(text)) < 256
    with pytest.raises(ConvertError, match="outside the model's vocabulary of 511"):
        compile_tokenizer(tmp_path, 511)
    for number, fault in ((12, "has the id 12"), (512, "has the id 512")):
        write_ranks(tmp_path, BYTES, dict(CONFIG, added_tokens_decoder={
            str(number): {"content": "x"}}))
        with pytest.raises(ConvertError, match=fault):
            compile_tokenizer(tmp_path, 2000)
    write_ranks(tmp_path, BYTES, dict(CONFIG, added_tokens_decoder={
        "256": {"content": "<|reserved_token_257|>"}}))
    with pytest.raises(ConvertError, match="two ids"):
        compile_tokenizer(tmp_path, 2000)


@pytest.mark.parametrize(("lines", "fault"), [
    ("IQ== 0\nIQ== 1\n", "ranks 0 and 1 are the same bytes"),
    ("IQ== 0\nIg== 0\n", "line 2: rank 0 is given twice"),
    ("IQ== 0\nIg== 2\n", "rank 1 is missing"),
    ("IQ== 0\nIg== 1\n", "lacks the byte 0x00"),
    ("IQ== 0\n*** 1\n", "line 2 is not"),
    ("IQ==\n", "line 1 is not"),
    ("IQ== -1\n", "line 1 is not"),
    ("IQ== 999999999999\n", "line 1 is not"),
    (" 0\n", "line 1 is not"),
    ("", "lacks the byte 0x00"),
])
def test_bad_rank_files(tmp_path, lines, fault):
    write_ranks(tmp_path, [], CONFIG)
    (tmp_path / "tiktoken.model").write_text(lines)
    with pytest.raises(ConvertError, match=f"tiktoken.model: .*{fault}"):
        compile_tokenizer(tmp_path, 1000)


def test_unknown_pattern_is_refused(tmp_path):
    write_ranks(tmp_path, BYTES, {"tokenizer_class": "OtherTokenizer", "auto_map": "none"})
    with pytest.raises(ConvertError, match="pattern.*OtherTokenizer"):
        compile_tokenizer(tmp_path, 1000)
    write_ranks(tmp_path, BYTES, dict(CONFIG, pat_str=r"\s+|\S+"))
    with pytest.raises(ConvertError, match="pat_str"):
        compile_tokenizer(tmp_path, 1000)
    write_ranks(tmp_path, BYTES, {"auto_map": {
        "AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}})
    branches = "".join(f'r"""{branch}""",\n' for branch in tiktoken_ranks.BRANCHES)
    code = f"pat_str = '|'.join([\n{branches}])"
    (tmp_path / "tokenization_kimi.py").write_text(code)
    compile_tokenizer(tmp_path, 1000)
    (tmp_path / "tokenization_kimi.py").write_text(code.replace("{1,3}", "{1,2}"))
    with pytest.raises(ConvertError, match="tokenization_kimi.py: unsupported pat_str"):
        compile_tokenizer(tmp_path, 1000)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConvertError, match="tokenizer_config.json is needed"):
        compile_tokenizer(tmp_path, 1000)


def test_tokenizer_json_is_taken_first(tmp_path):
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURE.parent / "o200k" / name, tmp_path)
    build = compile_tokenizer(tmp_path, 2000)
    assert build.data == compile_tokenizer(FIXTURE.parent / "o200k", 2000).data
    assert any("tiktoken.model is not used" in note for note in build.notes)
