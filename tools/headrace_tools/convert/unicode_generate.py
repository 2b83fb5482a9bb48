"""Writes unicode_data.py by asking the `tokenizers` library about every code point.

Run `python -m headrace_tools.convert.unicode_generate` after an update of `tokenizers`. The
library is asked, instead of a copy of the Unicode database, because its regular expressions and
its normaliser follow different Unicode versions, and equality with the library is the goal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

CATEGORIES = (
    "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Co", "Cn",
)
SURROGATES = range(0xD800, 0xE000)
HANGUL = range(0xAC00, 0xAC00 + 11172)
LIMIT = 0x110000

_HEADER = '''"""Unicode tables of tokenizers {version}; written by unicode_generate.py, do not edit.

CATEGORIES: general category and length (hexadecimal) of every run from U+0000 to U+10FFFF.
WHITE_SPACE, HAN, NUMERIC, PUNCTUATION, EXCLUDED: ranges first+length; NUMERIC and PUNCTUATION are
what the pre-tokenizers Digits and Punctuation cut out, EXCLUDED the code points with a canonical
decomposition that no composition gives back. COMBINING: class:first+length. DECOMPOSITIONS:
code point=its full canonical decomposition. Hangul syllables are left out. All hexadecimal.
"""

from __future__ import annotations

LIBRARY = "tokenizers {version}"
'''


def scalars() -> list[int]:
    """Every code point that a string may hold."""
    return [c for c in range(LIMIT) if c not in SURROGATES]


def runs(members: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending code points -> (first, length) of each run of neighbours."""
    out: list[tuple[int, int]] = []
    for c in members:
        if out and out[-1][0] + out[-1][1] == c:
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((c, 1))
    return out


def matching(pattern: str) -> list[int]:
    """The code points that the one-character regular expression `pattern` matches."""
    from tokenizers import Regex, pre_tokenizers

    text = "".join(map(chr, scalars()))
    split = pre_tokenizers.Split(Regex(f"{pattern}+"), "removed", invert=True)
    return sorted(ord(c) for piece, _ in split.pre_tokenize_str(text) for c in piece)


def isolated(pre_tokenizer: object) -> list[int]:
    """The code points that `pre_tokenizer` cuts out of a word one by one."""
    text = "".join(f"{chr(c)}a" for c in scalars() if c != ord("a"))
    pieces = pre_tokenizer.pre_tokenize_str(text)
    return sorted(ord(piece) for piece, _ in pieces if len(piece) == 1 and piece != "a")


def categories() -> list[str]:
    """The general category of each code point, surrogates as Cs."""
    table = ["" for _ in range(LIMIT)]
    for name in CATEGORIES:
        for c in matching(rf"\p{{{name}}}"):
            if table[c]:
                raise RuntimeError(f"U+{c:04X} is both {table[c]} and {name}")
            table[c] = name
    for c in SURROGATES:
        table[c] = "Cs"
    if "" in table:
        raise RuntimeError(f"U+{table.index(''):04X} has no category")
    return table


def decompositions() -> tuple[dict[int, str], list[int]]:
    """Full canonical decompositions (no Hangul), and the code points never composed again."""
    from tokenizers import normalizers

    nfc, nfd = normalizers.NFC(), normalizers.NFD()
    full: dict[int, str] = {}
    excluded = []
    for c in scalars():
        if c in HANGUL:
            continue
        parts = nfd.normalize_str(chr(c))
        if parts != chr(c):
            full[c] = parts
            if nfc.normalize_str(chr(c)) != chr(c):
                excluded.append(c)
    return full, excluded


def combining_classes() -> dict[int, int]:
    """Canonical combining classes, found by how the normaliser reorders pairs of marks.

    A mark moves in front of another exactly when its class is smaller and not 0.
    """
    import unicodedata

    from tokenizers import normalizers

    nfd = normalizers.NFD()

    def swaps(left: int, right: int) -> bool:
        return left != right and nfd.normalize_str(chr(left) + chr(right)) == chr(right) + chr(left)

    lowest, highest = 0x0334, 0x0345  # classes 1 and 240
    marks = [c for c in scalars() if swaps(highest, c) or swaps(c, lowest)]
    # Classes never change once assigned: any Unicode database has one mark for each class.
    known: dict[int, int] = {}
    for c in [*marks, lowest, highest]:
        known.setdefault(unicodedata.combining(chr(c)), c)
    known.pop(0, None)
    ladder = sorted(known.items())
    out = {lowest: 1, highest: 240}
    for c in marks:
        above = [k for k, mark in ladder if swaps(mark, c)]
        below = [k for k, mark in ladder if swaps(c, mark)]
        equal = [k for k, _ in ladder if k not in above and k not in below]
        if len(equal) != 1:
            raise RuntimeError(f"U+{c:04X}: class not among {equal}")
        out[c] = equal[0]
    return out


def packed(name: str, words: Iterable[str]) -> str:
    """A string constant of blank-separated words, wrapped."""
    lines = textwrap.wrap(" ".join(words), 92, break_long_words=False, break_on_hyphens=False)
    body = "\n".join(f'    "{line} "' for line in lines)
    return f"\n{name} = (\n{body}\n)\n"


def ranges(members: Iterable[int]) -> list[str]:
    return [f"{first:x}+{length:x}" for first, length in runs(members)]


def module_text() -> str:
    """The text of unicode_data.py."""
    import tokenizers
    from tokenizers import pre_tokenizers

    words = []
    table = categories()
    start = 0
    for c in range(1, LIMIT + 1):
        if c == LIMIT or table[c] != table[start]:
            words.append(f"{table[start]}{c - start:x}")
            start = c
    full, excluded = decompositions()
    classes = combining_classes()
    combining = []
    for value in sorted(set(classes.values())):
        members = sorted(c for c, k in classes.items() if k == value)
        combining += [f"{value:x}:{word}" for word in ranges(members)]
    parts = [
        f"{c:x}={','.join(f'{ord(part):x}' for part in text)}" for c, text in sorted(full.items())
    ]
    return (
        _HEADER.format(version=tokenizers.__version__)
        + packed("CATEGORIES", words)
        + packed("WHITE_SPACE", ranges(matching(r"\s")))
        + packed("HAN", ranges(matching(r"\p{Han}")))
        + packed("NUMERIC", ranges(isolated(pre_tokenizers.Digits(individual_digits=True))))
        + packed("PUNCTUATION", ranges(isolated(pre_tokenizers.Punctuation())))
        + packed("COMBINING", combining)
        + packed("DECOMPOSITIONS", parts)
        + packed("EXCLUDED", ranges(excluded))
    )


if __name__ == "__main__":
    Path(__file__).with_name("unicode_data.py").write_text(module_text(), encoding="ascii")
