"""Running headrace-convert inside the test process, and looking at what it wrote."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from headrace_tools.convert import cli
from headrace_tools.convert.quantise import decode

ROOT = Path(__file__).resolve().parents[1]
IDS_ONLY = ("--no-tokenizer", "--quiet")


def run(*argv: object) -> int:
    """Exit code of `headrace-convert ARGV`."""
    try:
        return cli.main([str(a) for a in argv])
    except SystemExit as stop:  # argparse
        return int(stop.code or 0)


def tree(path: Path) -> dict[str, str]:
    """File name -> SHA-256 of every file in a directory."""
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(path.iterdir())}


def data_files(path: Path) -> dict[str, str]:
    """`tree` of the trunk and the banks only."""
    return {name: digest for name, digest in tree(path).items() if name.endswith(".bin")}


def manifest(path: Path) -> dict:
    return json.loads((path / "manifest.json").read_text())


def trunk_tensor(path: Path, name: str) -> np.ndarray:
    """A resident tensor, decoded, in the manifest's shape."""
    entry = next(t for t in manifest(path)["trunk"]["tensors"] if t["name"] == name)
    with open(path / "trunk.bin", "rb") as file:
        file.seek(entry["offset"])
        blob = file.read(entry["bytes"])
    rows, cols = ([1, *entry["shape"]])[-2:]
    return decode(entry["codec"], blob, rows, cols).reshape(entry["shape"])


def measured(argv: list[object]) -> tuple[subprocess.CompletedProcess[str], float, int]:
    """The command in a process of its own: its seconds of processor time and peak bytes."""
    code = (
        "import sys; from headrace_tools.convert.cli import main; code = main();"
        "from support.processes import cost; print(*cost(), file=sys.stderr); sys.exit(code)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), str(ROOT / "tests")])}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], env=env, capture_output=True, text=True
    )
    seconds, peak = done.stderr.split()[-2:]
    return done, float(seconds), int(peak)
