"""engine/model/read_ahead.c: guesses go on as long as they save time, and no longer."""

from __future__ import annotations

import random

import pytest


@pytest.fixture
def governor(lib):
    ffi, C = lib

    class Governor:
        """Feeds tokens of a model with 40 layers; `used` and `wasted` are counted for each guess."""

        def __init__(self, width: int = 6, adaptive: bool = True) -> None:
            self.p = ffi.new("struct read_ahead *")
            C.read_ahead_init(self.p, width, adaptive)
            self.used = self.wasted = 0
            self.on = 0

        def token(self, with_: float, without: float, used: int = 3, wasted: int = 1) -> bool:
            guess = C.read_ahead_width(self.p) > 0
            if guess:
                self.used += 40 * used
                self.wasted += 40 * wasted
            self.on += guess
            C.read_ahead_learn(self.p, with_ if guess else without, 40 if guess else 0, self.used,
                               self.wasted)
            return guess

        def share(self, tokens: int, *args: float, noise: random.Random | None = None) -> float:
            """How often it guessed."""
            before = self.on
            for _ in range(tokens):
                f = noise.lognormvariate(0, 0.3) if noise else 1.0
                self.token(args[0] * f, args[1] * f, *args[2:])
            return (self.on - before) / tokens

    return Governor


def test_off_and_fixed_are_what_they_say(governor) -> None:
    off, fixed = governor(0, True), governor(4, False)
    for _ in range(3000):
        assert not off.token(0.5, 1.0)
        assert fixed.token(2.0, 1.0, 0, 9)


def test_it_stays_on_where_it_pays(governor) -> None:
    g = governor()
    assert g.share(24, 0.9, 1.0) == 0.5, "a trial takes turns"
    assert g.share(256, 0.9, 1.0) == 1
    assert g.share(2000, 0.9, 1.0) > 0.9


def test_it_goes_off_where_it_does_not(governor) -> None:
    g = governor()
    g.share(24, 1.0, 1.0)
    assert g.share(1000, 1.0, 1.0) == 0
    assert g.share(3000, 1.1, 1.0) < 0.05, "it is tried again now and then"
    assert g.share(3000, 0.8, 1.0) > 0.6, "and found when it begins to pay"


def test_it_sees_through_noise_and_drift(governor) -> None:
    assert governor().share(2000, 0.8, 1.0, noise=random.Random(3)) > 0.85
    g = governor()
    seconds = 1.0
    for _ in range(24):
        seconds *= 1.05
        g.token(0.85 * seconds, seconds)
    assert g.share(200, 0.85, 1.0) == 1
    g = governor()
    for _ in range(24):
        seconds *= 0.95
        g.token(1.1 * seconds, seconds)
    assert g.share(200, 1.1, 1.0) == 0


def test_more_in_vain_than_used_ends_it_at_once(governor) -> None:
    g = governor()
    assert g.share(24, 0.5, 1.0, 1, 3) < 0.5
    assert g.share(900, 0.5, 1.0, 1, 3) == 0
