"""Every file call of a conversion fails, tears or kills in turn, until no call is left to strike.

What each point checks is in tests/faults/convert_driver.py. CI converts a checkpoint of one layer;
tests/campaign/faults.py takes larger ones.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from support.injection import preload, run_driver
from tiny_checkpoint import text_config, write_checkpoint

pytestmark = pytest.mark.plain_build  # the shim and a run-time checker replace the same functions

# Name -> the fewest points it must find: a campaign that strikes nothing shows nothing.
CAMPAIGNS = {
    "kill": 60,
    "torn write, then kill": 30,
    "power cut": 60,
    "disk full": 50,
    "EIO once": 60,
    "EIO for good": 60,
    "read-only from then on": 10,
    "short writes": 2,
    "reading back fails": 25,
    "source: EIO once": 60,
    "source: gone": 60,
    "source: short reads": 2,
    "source: EINTR storm": 2,
    "target: EINTR storm": 2,
}


@pytest.fixture(scope="module")
def work():
    """A directory in memory where there is one: a thousand conversions wait for fsync otherwise."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="headrace-", dir=shm if shm.is_dir() else None))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def source(work):
    config = text_config(num_hidden_layers=1, layer_types=["full_attention"], hidden_size=64,
                         vocab_size=31, num_experts=3, moe_intermediate_size=16)
    return write_checkpoint(work / "source", config, shards=2)


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_every_call(build_dir, source, work, campaign):
    """B07, B08, B20: a named error or the right bytes, and the next run finishes."""
    if not preload(build_dir):
        pytest.skip("no fault shim: not Linux with glibc")
    place = work / campaign.replace(" ", "-")
    place.mkdir()
    (result,) = run_driver(build_dir, "convert_driver", source, place, "--no-tokenizer", campaign)
    assert not result["problems"], "\n".join(result["problems"][:20])
    assert result["points"] >= CAMPAIGNS[campaign], result
