"""Compiles regular expressions to the node programs of tokenizer.bin.

A program is a graph evaluated from the end of the text to its start: each node's value at a
position is where the preferred match from there ends. Nodes that do not consume (SPLIT, LOOK,
NOT, END) only point to later nodes, so one pass over the nodes a position is enough.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from . import codepoints, unicode_tables
from .codepoints import CodeSet
from .regex_parse import Chars, Choice, Concat, Look, Node, RegexError, Repeat, TextEnd

MATCH, SET, SPLIT, LOOK, NOT, END = range(6)
MAX_NODES = 2048  # of all programs together
MAX_CLASSES = 256


@dataclass
class _Step:
    op: int
    a: int = 0
    b: int = 0
    codes: CodeSet = ()


def shortest(node: Node) -> int:
    """Length in code points of the shortest match."""
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Concat):
        return sum(map(shortest, node.items))
    if isinstance(node, Choice):
        return min(map(shortest, node.items))
    if isinstance(node, Repeat):
        return node.least * shortest(node.item)
    return 0


class _Builder:
    """Builds the graph backwards: every call gets the step that follows and returns its own."""

    def __init__(self) -> None:
        self.steps = [_Step(MATCH)]

    def add(self, step: _Step) -> int:
        if len(self.steps) >= MAX_NODES:
            raise RegexError("an expression too large to compile")
        self.steps.append(step)
        return len(self.steps) - 1

    def build(self, node: Node, after: int) -> int:
        if isinstance(node, Chars):
            return self.add(_Step(SET, after, 0, node.codes))
        if isinstance(node, Concat):
            for item in reversed(node.items):
                after = self.build(item, after)
            return after
        if isinstance(node, Choice):
            starts = [self.build(item, after) for item in node.items]
            out = starts.pop()
            while starts:
                out = self.add(_Step(SPLIT, starts.pop(), out))
            return out
        if isinstance(node, Look):
            return self.add(_Step(NOT if node.negative else LOOK, self.build(node.item, 0), after))
        if isinstance(node, TextEnd):
            return self.add(_Step(END, after))
        return self.repeat(node, after)

    def repeat(self, node: Repeat, after: int) -> int:
        if node.most != 1 and shortest(node.item) == 0:
            raise RegexError("a repeated group that can match nothing")
        if node.most is None:
            loop = self.add(_Step(SPLIT))
            self.choose(loop, node, self.build(node.item, loop), after)
            out = loop
        else:
            out = after
            for _ in range(node.most - node.least):
                split = self.add(_Step(SPLIT))
                self.choose(split, node, self.build(node.item, out), after)
                out = split
        for _ in range(node.least):
            out = self.build(node.item, out)
        return out

    def choose(self, split: int, node: Repeat, more: int, after: int) -> None:
        """Fills the step that either repeats or goes on."""
        if node.mode == "possessive":  # going on is allowed only where repeating is not
            after = self.add(_Step(NOT, self.build(node.item, 0), after))
        step = self.steps[split]
        step.a, step.b = (after, more) if node.mode == "lazy" else (more, after)

    def targets(self, at: int) -> list[int]:
        """The steps that `at` points to."""
        step = self.steps[at]
        if step.op == MATCH:
            return []
        return [step.a] if step.op in (SET, END) else [step.a, step.b]

    def ordered(self, start: int) -> list[int]:
        """Reachable steps, each before those it points to without consuming."""
        reached = {start: None}
        queue = [start]
        while queue:
            for target in self.targets(queue.pop()):
                if target not in reached:
                    reached[target] = None
                    queue.append(target)
        left: list[int] = []
        seen: set[int] = set()
        for root in reached:
            stack = [(root, False)]
            while stack:
                at, leaving = stack.pop()
                if leaving:
                    left.append(at)
                elif at not in seen:
                    seen.add(at)
                    stack.append((at, True))
                    if self.steps[at].op != SET:
                        stack += [(target, False) for target in reversed(self.targets(at))]
        return left[::-1]


@dataclass
class Program:
    """One compiled expression: steps with indices into each other, `start` the first."""

    steps: list[_Step]
    start: int


def compile_tree(tree: Node) -> Program:
    """Raises RegexError for what a program cannot express."""
    if shortest(tree) == 0:
        raise RegexError("an expression that can match nothing")
    builder = _Builder()
    start = builder.build(tree, 0)
    order = builder.ordered(start)
    place = {old: new for new, old in enumerate(order)}
    steps = []
    for new, old in enumerate(order):
        step = builder.steps[old]
        a = place[step.a] if step.op != MATCH else 0
        b = place[step.b] if step.op in (SPLIT, LOOK, NOT) else 0
        if step.op in (SPLIT, LOOK, NOT, END) and (a <= new or (step.op != END and b <= new)):
            raise RegexError("a loop that consumes nothing")
        steps.append(_Step(step.op, a, b, step.codes))
    return Program(steps, place[start])


@dataclass
class Programs:
    """The pre-tokenizer sections of tokenizer.bin."""

    splits: bytes
    nodes: bytes
    sets: bytes
    class_index: bytes
    class_blocks: bytes


def assemble(programs: list[tuple[Program, bool]]) -> Programs:
    """Packs (program, drop what it does not match) with their common character classes."""
    distinct: dict[CodeSet, int] = {}
    for program, _ in programs:
        for step in program.steps:
            if step.op == SET:
                distinct.setdefault(step.codes, len(distinct))
    runs, members = codepoints.partition(list(distinct))
    if max(number for _, number in runs) >= MAX_CLASSES:
        raise RegexError("more than 256 classes of characters")
    sets = b"".join(
        sum(1 << number for number in inside).to_bytes(MAX_CLASSES // 8, "little")
        for inside in members
    )
    splits, nodes, first = b"", b"", 0
    for program, drop in programs:
        splits += struct.pack("<IIII", first, len(program.steps), program.start, int(drop))
        for step in program.steps:
            number = distinct[step.codes] if step.op == SET else 0
            nodes += struct.pack("<HHHH", step.op, step.a, step.b, number)
        first += len(program.steps)
    if first > MAX_NODES:
        raise RegexError("expressions too large to compile")
    table = unicode_tables.two_stage(runs, "B")
    return Programs(splits, nodes, sets, table.index, table.blocks)
