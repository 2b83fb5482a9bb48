"""Parses pre-tokenizer regular expressions (Oniguruma syntax) into a small tree.

Only constructs whose meaning the compiled program reproduces exactly are accepted; anything else
raises RegexError with the construct's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

from . import codepoints, unicode_tables
from .codepoints import CodeSet


class RegexError(Exception):
    """A construct that cannot be compiled; the message names it."""


@dataclass(frozen=True)
class Chars:
    """One code point of `codes`; `letter` is the ASCII letter of a case-insensitive literal."""

    codes: CodeSet
    letter: str = ""


@dataclass(frozen=True)
class Concat:
    items: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    items: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    item: "Node"
    least: int
    most: int | None
    mode: str = field(default="greedy")  # greedy, lazy, possessive


@dataclass(frozen=True)
class Look:
    item: "Node"
    negative: bool


@dataclass(frozen=True)
class TextEnd:
    pass


Node = Union[Chars, Concat, Choice, Repeat, Look, TextEnd]

MAX_REPEAT = 64
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7, "e": 27}
_NEWLINE = codepoints.single(10)
# Pairs of letters that Oniguruma also matches with one ligature when case is ignored.
_LIGATURES = ("ss", "st", "ff", "fi", "fl")


def shorthand(letter: str) -> CodeSet | None:
    """The set of \\s, \\S, \\d, \\D; None for other letters."""
    table = {"s": unicode_tables.white_space(), "d": unicode_tables.property_set("Nd")}
    codes = table.get(letter.lower())
    if codes is None:
        return None
    return codes if letter.islower() else codepoints.complement(codes)


def fold(codes: CodeSet) -> CodeSet:
    """Adds the other case of ASCII letters, long s and the Kelvin sign among them.

    Raises RegexError for code points whose case folding is not reproduced here.
    """
    extra: list[CodeSet] = []
    for start, stop in codes:
        if stop - start > 4096:
            raise RegexError("a large set under (?i:...)")
        for code in range(start, stop):
            if code < 128:
                if chr(code).isalpha():
                    extra.append(codepoints.single(ord(chr(code).swapcase())))
                    if chr(code) in "sS":
                        extra.append(codepoints.single(0x17F))
                    if chr(code) in "kK":
                        extra.append(codepoints.single(0x212A))
            elif unicode_tables.category(code)[0] not in "PZ":
                raise RegexError(f"U+{code:04X} under (?i:...)")
    return codepoints.union(codes, *extra)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0
        self.ignore_case = False

    def peek(self, ahead: int = 0) -> str:
        return self.text[self.at + ahead : self.at + ahead + 1]

    def take(self) -> str:
        c = self.peek()
        if not c:
            raise RegexError("a pattern that ends too early")
        self.at += 1
        return c

    def accept(self, literal: str) -> bool:
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return True
        return False

    def choice(self) -> Node:
        branches = [self.concat()]
        while self.accept("|"):
            branches.append(self.concat())
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def concat(self) -> Node:
        items: list[Node] = []
        while self.peek() and self.peek() not in "|)":
            item = self.quantified()
            items += item.items if isinstance(item, Concat) else [item]
        letters = "".join(i.letter if isinstance(i, Chars) and i.letter else " " for i in items)
        for pair in _LIGATURES:
            if pair in letters:
                raise RegexError(f'"{pair}" under (?i:...), which also matches a ligature')
        return items[0] if len(items) == 1 else Concat(tuple(items))

    def quantified(self) -> Node:
        item = self.atom()
        after_interval = False
        while True:
            bounds = self.bounds()
            if bounds is None:
                return item
            if isinstance(item, (Look, TextEnd)):
                raise RegexError("a quantifier after a lookahead or an anchor")
            least, most, interval = bounds
            mode = "greedy"
            if self.peek() == "?":
                if interval and least == most:
                    raise RegexError("{n}?")
                self.take()
                mode = "lazy"
            elif self.peek() == "+" and not interval:
                self.take()
                mode = "possessive"
            if mode == "possessive" and not isinstance(item, Chars):
                raise RegexError("a possessive quantifier on a group")
            # In Oniguruma x{m,n}+ is (?:x{m,n})+, not a possessive interval.
            if isinstance(item, Repeat) and (interval or not after_interval):
                raise RegexError("a quantifier on a quantifier")
            after_interval = interval
            item = Repeat(item, least, most, mode)

    def bounds(self) -> tuple[int, int | None, bool] | None:
        """(least, most, written as {m,n}) of a quantifier here, if there is one."""
        for mark, least, most in (("?", 0, 1), ("*", 0, None), ("+", 1, None)):
            if self.accept(mark):
                return least, most, False
        if self.peek() != "{":
            return None
        stop = self.text.find("}", self.at)
        body = self.text[self.at + 1 : stop] if stop > 0 else ""
        low, comma, high = body.partition(",")
        if not all(part == "" or (part.isascii() and part.isdigit()) for part in (low, high)):
            return None  # Oniguruma takes such a brace as a literal
        if not low and not high:
            return None
        self.at = stop + 1
        least = int(low or 0)
        most = (int(high) if high else None) if comma else least
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < max(least, 1)):
            raise RegexError(f"the repeat counts {{{body}}}")
        return least, most, True

    def chars(self, codes: CodeSet, letter: str = "") -> Chars:
        if not self.ignore_case:
            return Chars(codes)
        return Chars(fold(codes), letter)

    def atom(self) -> Node:
        c = self.take()
        if c == "(":
            return self.group()
        if c == "[":
            return Chars(self.char_class())
        if c == "\\":
            return self.escape_atom()
        if c == ".":
            return Chars(codepoints.complement(_NEWLINE))
        if c == "$":
            return Look(Choice((Chars(_NEWLINE), TextEnd())), False)
        if c == "^":
            raise RegexError('the anchor "^"')
        if c in "*+?":
            raise RegexError(f'"{c}" at the start of an expression')
        return self.literal(c)

    def literal(self, c: str) -> Chars:
        letter = c.lower() if c.isascii() and c.isalpha() else ""
        return self.chars(codepoints.single(ord(c)), letter)

    def escape_atom(self) -> Node:
        c = self.peek()
        if c in "zZ" and c:
            self.take()
            if c == "z":
                return TextEnd()
            return Look(Concat((Repeat(Chars(_NEWLINE), 0, 1), TextEnd())), False)
        codes = self.escape()
        first, stop = codes[0]
        if len(codes) == 1 and stop - first == 1:
            return self.literal(chr(first))
        return Chars(codes)

    def escape(self) -> CodeSet:
        """What follows a backslash, as a set."""
        c = self.take()
        if c in "pP":
            return self.property(c == "P")
        codes = shorthand(c)
        if codes is not None:
            return codes
        if c in _CONTROL:
            return codepoints.single(_CONTROL[c])
        if c == "x" and self.accept("{"):
            stop = self.text.find("}", self.at)
            digits, self.at = self.text[self.at : stop], stop + 1
            return codepoints.single(self.hexadecimal(digits if stop > 0 else ""))
        if c in "xu":
            count = 2 if c == "x" else 4
            digits, self.at = self.text[self.at : self.at + count], self.at + count
            return codepoints.single(self.hexadecimal(digits if len(digits) == count else ""))
        if c.isascii() and c.isalnum():
            raise RegexError(f"\\{c}")
        return codepoints.single(ord(c))

    def hexadecimal(self, digits: str) -> int:
        try:
            code = int(digits, 16)
        except ValueError:
            raise RegexError(f"the hexadecimal escape {digits!r}") from None
        if code >= codepoints.LIMIT or 0xD800 <= code < 0xE000 or (len(digits) == 2 and code > 127):
            raise RegexError(f"the hexadecimal escape {digits!r}")
        return code

    def property(self, negated: bool) -> CodeSet:
        stop = self.text.find("}", self.at)
        if not self.accept("{") or stop < 0:
            raise RegexError("\\p without {...}")
        name, self.at = self.text[self.at : stop], stop + 1
        if self.ignore_case:
            raise RegexError("\\p{...} under (?i:...)")
        if name.startswith("^"):
            name, negated = name[1:], not negated
        codes = unicode_tables.property_set(name)
        if codes is None:
            raise RegexError(f"\\p{{{name}}}")
        return codepoints.complement(codes) if negated else codes

    def char_class(self) -> CodeSet:
        """After "[", up to and with the closing bracket."""
        negated = self.accept("^")
        operands: list[CodeSet] = []
        codes: list[CodeSet] = []
        first = True
        while True:
            if self.peek() == "]" and not first:
                self.take()
                break
            if self.accept("&&"):
                operands.append(codepoints.union(*codes))
                codes = []
            elif self.text.startswith("[:", self.at):
                raise RegexError("a POSIX bracket [:...:]")
            elif self.accept("["):
                codes.append(self.char_class())
            else:
                codes.append(self.class_range())
            first = False
        operands.append(codepoints.union(*codes))
        out = operands[0]
        for other in operands[1:]:
            out = codepoints.intersection(out, other)
        if self.ignore_case:
            out = fold(out)
        return codepoints.complement(out) if negated else out

    def class_item(self) -> CodeSet:
        return self.escape() if self.accept("\\") else codepoints.single(ord(self.take()))

    def class_range(self) -> CodeSet:
        low = self.class_item()
        if self.peek() != "-" or self.peek(1) in ("]", ""):
            return low
        single = len(low) == 1 and low[0][1] - low[0][0] == 1
        if not single or self.peek(1) in "[-" or self.text.startswith("&&", self.at + 1):
            if single and low == codepoints.single(ord("-")):
                raise RegexError('a range that begins with "-"')
            raise RegexError('"-" after a set in a character class')
        self.take()
        high = self.class_item()
        if len(high) != 1 or high[0][1] - high[0][0] != 1 or high[0][0] < low[0][0]:
            raise RegexError("a character range without two ends")
        return ((low[0][0], high[0][1]),)

    def group(self) -> Node:
        before = self.ignore_case
        look: bool | None = None
        if self.accept("?"):
            if self.accept("="):
                look = False
            elif self.accept("!"):
                look = True
            elif self.accept("i:"):
                self.ignore_case = True
            elif self.accept("-i:"):
                self.ignore_case = False
            elif not self.accept(":"):
                raise RegexError(f"(?{self.text[self.at : self.at + 2]}")
        inside = self.choice()
        if not self.accept(")"):
            raise RegexError("a group that is not closed")
        self.ignore_case = before
        return inside if look is None else Look(inside, look)


def parse(pattern: str) -> Node:
    """The tree of `pattern`; raises RegexError."""
    parser = _Parser(pattern)
    tree = parser.choice()
    if parser.peek():
        raise RegexError('")" without "("')
    return tree


def literal(text: str) -> Node:
    """The tree that matches exactly `text`."""
    return Concat(tuple(Chars(codepoints.single(ord(c))) for c in text))
