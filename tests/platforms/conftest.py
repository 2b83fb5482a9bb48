"""Containers that were scored on this machine: what every other machine must reproduce."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import platforms
from support.platforms import COVERING, Scored

from conftest import FIXTURES, convert


@pytest.fixture(scope="session")
def scored(build_dir: Path, headrace_bin: Path,
           tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scored]:
    """Checkpoint name -> its container and the logits hash of the build for this machine."""
    base = tmp_path_factory.mktemp("scored")

    def make(row: tuple[str, str, str]) -> tuple[str, Scored]:
        name, experts, trunk = row
        path = convert(FIXTURES / name, base / name, "--experts", experts, "--trunk", trunk,
                       "--no-tokenizer", "--quiet")  # fmt: skip
        ids = platforms.write_ids(path, base / f"{name}.ids")
        return name, Scored(path, ids, platforms.logits_hash([headrace_bin], path, ids))

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(make, COVERING))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few lines of English for the bundled model."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("It was a fine morning in the spring, when Elizabeth “walked” to Rosings.\n")
    return path
