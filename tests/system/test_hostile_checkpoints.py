"""The converter on hostile checkpoints: what tests/fuzz/checkpoint_script.py makes of byte strings.

Whatever is wrong, the converter converts or refuses with a reason; nothing half done looks whole.
A campaign that is guided by coverage is tests/fuzz/fuzz_converter.py.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes import bound_address_space
from support.sanitizers import sanitized

FUZZ = Path(__file__).resolve().parents[1] / "fuzz"
sys.path.insert(0, str(FUZZ))

import checkpoint_script  # noqa: E402

CORPUS = sorted((FUZZ / "corpus" / "converter").iterdir())
SPACE = 4 << 30


@pytest.fixture(scope="module", autouse=True)
def bounded(headrace):
    """An allocation that believes a hostile number fails, and the converter then ends with exit 4."""
    if sanitized():
        yield
        return
    before = bound_address_space(SPACE)
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "work"


@pytest.mark.parametrize("seed", CORPUS, ids=lambda p: p.name)
def test_seeds(seed, work):
    code = checkpoint_script.run(seed.read_bytes(), work)
    if seed.name.endswith("-whole"):
        assert code == 0, "the checkpoint that everything starts from"


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.binary(min_size=3, max_size=60))
def test_scripts(data, work):
    checkpoint_script.run(data, work)


def test_findings_are_told(work, monkeypatch):
    """The checks can fail: a converter that crashes, lies about success or gives no reason."""
    def crash(_argv):
        raise ZeroDivisionError

    cases = {"no reason": lambda _argv: 3, "success without a result": lambda _argv: 0, "another code": lambda _argv: 1}
    for act in cases.values():
        monkeypatch.setattr(checkpoint_script.cli, "main", act)
        with pytest.raises(checkpoint_script.Finding):
            checkpoint_script.run(bytes(2), work)
    monkeypatch.setattr(checkpoint_script.cli, "main", crash)
    with pytest.raises(ZeroDivisionError):
        checkpoint_script.run(bytes(2), work)
