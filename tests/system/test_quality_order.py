"""Codecs of the bundled checkpoint in the order of what they cost, measured as docs/performance.md does."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

import pytest
from conftest import CHECKPOINT
from headrace_tools.convert import calibration, codebooks
from headrace_tools.measure import quality

BUDGET = 10_500_000
CHOICES = ("int8/bf16", "nl4/bf16", "rvq3/bf16", "rvq3/bf16 --effort greedy", "scalar3/bf16",
           f"hybrid/bf16 --budget {BUDGET} --candidates nl4,rvq3")


@pytest.fixture(scope="module")
def rows(headrace, tmp_path_factory):
    """Choice -> cells of its row. Few samples and windows: the order is far from chance."""
    saved = codebooks._SAMPLES, calibration.EXPERTS
    codebooks._SAMPLES, calibration.EXPERTS = 4096, 3
    out = StringIO()
    try:
        with redirect_stdout(out):
            code = quality.main([str(CHECKPOINT), "--codecs", *CHOICES, "--windows", "4",
                                 "--work", str(tmp_path_factory.mktemp("quality"))])
    finally:
        codebooks._SAMPLES, calibration.EXPERTS = saved
    assert code == 0
    lines = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in out.getvalue().splitlines()[5:]]
    return dict(zip(CHOICES, lines, strict=True))


def kl(row: list[str]) -> float:
    return float(row[6])


def test_int8_is_hardly_noticed(rows):
    assert 0 < kl(rows["int8/bf16"]) < 0.002


def test_encoding_well_is_worth_a_quarter(rows):
    """At the same bytes: a beam and codebooks fitted together against residual k-means."""
    default, greedy = rows["rvq3/bf16"], rows["rvq3/bf16 --effort greedy"]
    assert default[3] == greedy[3] and default[4] == greedy[4]
    assert kl(default) < 0.75 * kl(greedy)


def test_three_bits_beat_a_scalar_of_three_bits(rows):
    vectors, scalar = rows["rvq3/bf16"], rows["scalar3/bf16"]
    assert vectors[4] == scalar[4] and vectors[3] == scalar[3]
    assert kl(vectors) < 0.85 * kl(scalar)


def test_a_budget_between_two_codecs_is_spent(rows):
    """Where the next uniform codec is too large, mixing takes most of the damage away."""
    hybrid = rows[CHOICES[-1]]
    assert float(rows["rvq3/bf16"][2]) < float(hybrid[2]) <= BUDGET / 1e6 < float(rows["nl4/bf16"][2])
    assert kl(rows["nl4/bf16"]) < kl(hybrid) < 0.75 * kl(rows["rvq3/bf16"])
