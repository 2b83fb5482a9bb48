"""tokenizer.bin against the `tokenizers` library and the fixture corpus."""

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
from headrace_tools.convert.tokenizer import byte_alphabet, compile_tokenizer
from headrace_tools.crc32c import crc32c
from support.text import CoreError, CoreTokenizer, without_added_tokens

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "tokenizers"
FOLDERS = {
    "qwen36": FIXTURES / "qwen36",
    "deepseek_v3": FIXTURES / "deepseek_v3",
    "o200k": FIXTURES / "o200k",
    "model": ROOT / "models" / "tiny-qwen3.5-moe",
}
NAMES = list(FOLDERS)
CORPORA = ["qwen36", "deepseek_v3", "o200k"]
SETTINGS = settings(max_examples=150, deadline=None)

# Code points where the pre-tokenizer, case folding and normalisation have something to decide.
TELLING = (
    [ord(c) for c in " \t\n\r'sStTlLdDmMrReEvV0129abXYZ.,!?/-_<|>"]
    + [0, 0x7F, 0x85, 0xA0, 0x17F, 0x212A, 0x2028, 0x200D, 0x3000, 0xFFFD, 0x110BA, 0x1F600]
)


@pytest.fixture(scope="module")
def tables():
    """name -> compiled tokenizer.bin."""
    return {name: compile_tokenizer(folder, 1 << 20) for name, folder in FOLDERS.items()}


@pytest.fixture(scope="module")
def core(lib, tables):
    """name -> opened tokenizer."""
    opened = {name: CoreTokenizer(lib, table.data) for name, table in tables.items()}
    yield opened
    for tokenizer in opened.values():
        tokenizer.close()


@pytest.fixture(scope="module")
def reference():
    """name -> (the library's tokenizer, the same without added tokens)."""
    out = {}
    for name, folder in FOLDERS.items():
        path = folder / "tokenizer.json"
        out[name] = (
            tokenizers.Tokenizer.from_file(str(path)),
            tokenizers.Tokenizer.from_str(without_added_tokens(path)),
        )
    return out


def ids_of(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def scalars() -> st.SearchStrategy[str]:
    marks = sorted(unicode_tables.combining_classes())
    moving = sorted(unicode_tables.unstable() | set(unicode_tables.decompositions()))
    code = st.one_of(
        st.sampled_from(TELLING), st.sampled_from(TELLING), st.sampled_from(marks),
        st.sampled_from(moving), st.integers(0x1100, 0x11FF), st.integers(0xAC00, 0xD7A3),
        st.integers(0x300, 0x3000), st.integers(0, 0xD7FF), st.integers(0xE000, 0x10FFFF),
    )
    return st.lists(code, max_size=40).map(lambda codes: "".join(map(chr, codes)))


@pytest.mark.parametrize("name", CORPORA)
def test_corpus(core, name):
    cases = [json.loads(line) for line in (FOLDERS[name] / "cases.jsonl").open()]
    assert len(cases) == 618
    for case in cases:
        if case["cat"] == "decode":
            assert core[name].decode(case["ids"]).hex() == case["decode_hex"], case["n"]
            continue
        raw = bytes.fromhex(case["hex"])
        assert core[name].encode(raw, special=True) == case["ids"], case
        plain = core[name].encode(raw)
        assert plain == case.get("ids_plain", case["ids"]), case
        normal = bytes.fromhex(case.get("normalized_hex", case["hex"]))
        assert core[name].decode(plain) == normal


@pytest.mark.parametrize("name", NAMES)
def test_random_text(core, reference, name):
    full, plain = reference[name]
    spellings = [token.content for token in full.get_added_tokens_decoder().values()]

    @SETTINGS
    @given(st.lists(st.one_of(scalars(), scalars(), st.sampled_from(spellings)), max_size=4))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        assert core[name].encode(text, special=True) == ids_of(full, text)
        assert core[name].encode(text) == ids_of(plain, text)

    check()


def test_every_code_point(core, reference):
    text = "".join(f"{chr(c)}a" for c in range(0x20, 0x30000) if not 0xD800 <= c < 0xE000)
    for start in range(0, len(text), 20000):
        part = text[start : start + 20000]
        assert core["model"].encode(part) == ids_of(reference["model"][1], part), hex(start)


@pytest.mark.parametrize("name", NAMES)
def test_special_spellings(core, reference, tables, name):
    """In user text they are text; on request one id each, in the middle of a word too."""
    assert tables[name].added
    for spelling, number in tables[name].added.items():
        text = f"abc{spelling}def {spelling}{spelling[:-1]}"
        plain = core[name].encode(text)
        assert not set(plain) & set(tables[name].added.values())
        assert core[name].decode(plain) == text.encode()
        marked = core[name].encode(text, special=True)
        assert marked.count(number) == 2 and marked == ids_of(reference[name][0], text)
        assert core[name].token(number) == spelling.encode()
        is_control = core[name].core.tokenizer_is_control(core[name].handle, number)
        assert is_control == (number in tables[name].control)


@pytest.mark.parametrize("name", NAMES)
def test_every_id_decodes(core, reference, name):
    tokenizer = core[name]
    size = tokenizer.core.tokenizer_vocab(tokenizer.handle)
    assert size == reference[name][0].get_vocab_size(with_added_tokens=True)
    alphabet = byte_alphabet()
    added = reference[name][0].get_added_tokens_decoder()
    for number in range(size):
        token = reference[name][0].id_to_token(number)
        if number in added:
            assert tokenizer.token(number) == token.encode()
        else:
            assert tokenizer.token(number) == bytes(alphabet[c] for c in token)
    for outside in (-1, size, 2**31 - 1):
        assert tokenizer.token(outside) == b""
        assert not tokenizer.core.tokenizer_is_control(tokenizer.handle, outside)


@pytest.mark.parametrize("unit", ["a", "A", " ", "\n", "1", ".", "\u4e00", "\u0301", " \n", "ab ",
                                  "e\u0301\u0316", "\u1100\u1161"])
def test_long_runs_take_linear_time(core, reference, unit):
    for name in ("qwen36", "model"):
        text = unit * (100_000 // len(unit.encode()))
        start = time.thread_time()
        ids = core[name].encode(text)
        assert time.thread_time() - start < 3.0  # a quadratic walk takes far longer
        assert ids == ids_of(reference[name][1], text)


def test_long_piece_of_many_merges(core, reference):
    letters = "".join(random.Random(5).choices("theandforrst", k=100_000))
    assert core["model"].encode(letters) == ids_of(reference["model"][1], letters)


@SETTINGS
@given(st.lists(st.one_of(st.binary(max_size=6), st.sampled_from(
    [b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\xe2\x82", b"\xf4\x90\x80\x80", b"ab "])),
    max_size=8).map(b"".join))
def test_ill_formed_bytes_become_replacements(core, raw):
    text = raw.decode("utf-8", "replace")
    assert core["qwen36"].encode(raw) == core["qwen36"].encode(text)


def test_capacity(core):
    marks = "e\u0301\u0344 \ufb1d".encode()
    for text in (b"some words, and <|im_end|> more", marks, b"\xff\xfe a"):
        for special in (False, True):
            ids = core["qwen36"].encode(text, special)
            for capacity in range(len(ids) + 3):
                status, count, buffer = core["qwen36"].encode_into(text, special, capacity)
                assert count == len(ids)
                if capacity < len(ids):
                    assert status == core["qwen36"].core.HR_ERR_USAGE
                    assert buffer == [-7] * capacity
                else:
                    assert status == 0 and buffer[:count] == ids
    assert core["qwen36"].encode_into(b"", True, 0) == (0, 0, [])


def test_memory_is_refused_not_overrun(lib, tables):
    text = ("a" * 100_000 + "e\u0301" * 10_000).encode()
    cost = lib[1].tokenizer_cost(len(tables["qwen36"].data))
    with CoreTokenizer(lib, tables["qwen36"].data, limit=cost + 200_000) as tokenizer:
        assert tokenizer.opened <= cost
        with pytest.raises(CoreError) as failure:
            tokenizer.encode(text)
        assert failure.value.status == lib[1].HR_ERR_MEMORY
        assert tokenizer.encode("still alive")
    with pytest.raises(CoreError) as failure:
        CoreTokenizer(lib, tables["qwen36"].data, limit=64)
    assert failure.value.status == lib[1].HR_ERR_MEMORY


def sealed(data: bytearray) -> bytes:
    """The file with its checksum made right."""
    data[12:16] = bytes(4)
    data[12:16] = crc32c(bytes(data)).to_bytes(4, "little")
    return bytes(data)


def test_damaged_file_is_refused(lib, tables):
    data = tables["qwen36"].data
    for at in [*range(0, 40), *range(40, len(data), 997)]:
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        with pytest.raises(CoreError) as failure:
            CoreTokenizer(lib, bytes(flipped))
        assert "tokenizer.bin" in str(failure.value)
    for length in (0, 7, 39, 40, 495, 496, 5000, len(data) - 1):
        with pytest.raises(CoreError):
            CoreTokenizer(lib, data[:length])
    with pytest.raises(CoreError, match="outside the model's vocabulary"):
        CoreTokenizer(lib, data, vocab_size=908)
    CoreTokenizer(lib, data, vocab_size=909).close()


def test_hostile_file(lib, tables):
    """Any change under a right checksum is an error or a tokenizer that stays within bounds."""
    chance = random.Random(11)
    opened = 0
    for round_number in range(400):
        name = chance.choice(NAMES)
        data = bytearray(tables[name].data)
        limit = 496 if round_number % 4 == 0 else len(data)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(16, limit)
            data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        try:
            tokenizer = CoreTokenizer(lib, sealed(data))
        except CoreError:
            continue
        opened += 1
        with tokenizer:
            mixed = "ab 12\r\n'S e\u0301\uac00\u11a8 <|im_end|><think>"
            for text in (mixed, "\u4e00" * 50, " " * 3000):
                for number in tokenizer.encode(text):
                    assert not tokenizer.core.tokenizer_is_control(tokenizer.handle, number)
                tokenizer.encode(text, special=True)
    assert opened > 20


def qwen_spec() -> dict:
    return json.loads((FOLDERS["qwen36"] / "tokenizer.json").read_text(encoding="utf-8"))


def test_added_tokens_of_both_files(lib, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(qwen_spec()))
    config = {"eos_token": {"content": "<extra>"}, "added_tokens_decoder": {
        "950": {"content": "<extra>", "special": True, "normalized": False},
        "907": {"content": "<think>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    build = compile_tokenizer(tmp_path, 1000)
    assert build.named == {"eos_token": 950} and {907, 950} <= set(build.control)
    assert any("<extra>" in note for note in build.notes)
    with CoreTokenizer(lib, build.data) as tokenizer:
        assert tokenizer.core.tokenizer_vocab(tokenizer.handle) == 951
        assert tokenizer.token(930) == b""
        assert 950 in tokenizer.encode("a<extra>b", special=True)
        assert 950 not in tokenizer.encode("a<extra>b")
    with pytest.raises(ConvertError, match="outside the model's vocabulary of 950"):
        compile_tokenizer(tmp_path, 950)
    config["added_tokens_decoder"]["950"]["content"] = "<think>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConvertError, match="two ids"):
        compile_tokenizer(tmp_path, 1000)


def test_longest_added_token_wins(lib, tmp_path):
    spec = qwen_spec()
    for offset, (content, normalized) in enumerate(
        [("<a>", False), ("<a><b>", False), ("<a><b><c>x", False), ("<b", False), ("zz", True),
         ("zzz", True)]
    ):
        spec["added_tokens"].append({"id": 909 + offset, "content": content, "special": False,
                                     "normalized": normalized, "single_word": False,
                                     "lstrip": False, "rstrip": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with CoreTokenizer(lib, compile_tokenizer(tmp_path, 1000).data) as tokenizer:
        for text in ("<a><b><c>y<a><b><c>xzzzz", "<<a<a><b", "z<a>zz<bz", "zzzz\u0301 zz\u0301"):
            assert tokenizer.encode(text, special=True) == ids_of(library, text), text


@pytest.mark.parametrize(("path", "value", "named"), [
    (["normalizer"], {"type": "NFKC"}, "normalizer NFKC"),
    (["normalizer"], {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}, "Lowercase"),
    (["pre_tokenizer"], None, "ByteLevel"),
    (["pre_tokenizer"], {"type": "Metaspace"}, "pre_tokenizer Metaspace"),
    (["pre_tokenizer", "pretokenizers", 0], {"type": "Whitespace"}, "pre_tokenizer Whitespace"),
    (["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"], "^a", 'the anchor "\\^"'),
    (["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"], r"\w+", r"construct .*\\w"),
    (["pre_tokenizer", "pretokenizers", 0], {"type": "Punctuation", "behavior": "Removed"},
     "Punctuation with behavior Removed"),
    (["normalizer"], {"type": "Prepend", "prepend": "\u2581"}, "normalizer Prepend"),
    (["pre_tokenizer", "pretokenizers", 0, "behavior"], "MergedWithNext", "MergedWithNext"),
    (["pre_tokenizer", "pretokenizers", 1, "add_prefix_space"], True, "add_prefix_space"),
    (["model", "type"], "Unigram", "model type Unigram"),
    (["model", "dropout"], 0.1, "dropout"),
    (["model", "byte_fallback"], True, "byte_fallback"),
    (["model", "continuing_subword_prefix"], "##", "continuing_subword_prefix"),
    (["model", "end_of_word_suffix"], "</w>", "end_of_word_suffix"),
    (["added_tokens", 0, "lstrip"], True, "lstrip"),
    (["added_tokens", 0, "single_word"], True, "single_word"),
    (["model", "merges", 3], ["a", "nothing"], "merge 3"),
])
def test_unsupported_is_refused_by_name(tmp_path, path, value, named):
    spec = qwen_spec()
    place = spec
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConvertError, match=named):
        compile_tokenizer(tmp_path, 1000)


def test_merge_that_builds_a_special_token_is_refused(tmp_path):
    spec = qwen_spec()
    token = next("".join(pair) for pair in spec["model"]["merges"] if "".join(pair).isascii())
    spec["added_tokens"].append({"id": spec["model"]["vocab"][token], "content": token,
                                 "special": True, "normalized": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConvertError, match="from plain text"):
        compile_tokenizer(tmp_path, 1000)


def test_missing_and_unknown_files(tmp_path):
    with pytest.raises(ConvertError, match="no tokenizer.json and no tiktoken.model"):
        compile_tokenizer(tmp_path, 1000)
    for name in ("tokenizer.model", "qwen.tiktoken"):
        (tmp_path / name).write_bytes(b"IQ== 0\n")
        with pytest.raises(ConvertError, match=f"{name}: not supported"):
            compile_tokenizer(tmp_path, 1000)


def test_conversion_is_reproducible(tables):
    for name, folder in FOLDERS.items():
        assert compile_tokenizer(folder, 1 << 20).data == tables[name].data
