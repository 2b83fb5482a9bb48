"""`headrace-convert SRC --plan --json`, then a container of the planned sizes whose data are holes.

    python tests/plan_published.py SRC CONTAINER
Prints the plan; on standard error, what it cost in seconds of processor time and peak bytes.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from headrace_tools.convert import cli
from headrace_tools.convert.preflight import TRUNK_CHUNK, Preflight
from headrace_tools.convert.writer import build_manifest
from support.processes import cost


def write_holes(pre: Preflight, target: Path) -> None:
    """Manifest and files of the right sizes; digests and checksums of the data are zeros."""
    target.mkdir()
    files = pre.files()
    done: dict[str, dict[str, object]] = {}
    for name, size in files.items():
        with open(target / name, "wb") as file:
            file.truncate(size)
        done[name] = {"crc32c": [0] * -(-size // TRUNK_CHUNK)}
    for bank in pre.banks:
        done[bank.file] = {"crc32c": [0] * bank.spec.experts}
    manifest = build_manifest(pre, done, {})
    (target / "manifest.json").write_bytes(manifest)
    digests = {**dict.fromkeys(files, "0" * 64)}
    digests["manifest.json"] = hashlib.sha256(manifest).hexdigest()
    lines = [f"{digests[name]}  {name}\n" for name in sorted(digests)]
    (target / "manifest.sha256").write_text("".join(lines))


def main() -> int:
    kept: list[Preflight] = []
    plain = cli.preflight

    def preflight(*args: object) -> Preflight:
        kept.append(plain(*args))  # type: ignore[arg-type]
        return kept[0]

    cli.preflight = preflight
    code = cli.main([sys.argv[1], "--plan", "--json", "--no-tokenizer"])
    print(*cost(), file=sys.stderr)
    if code == 0:
        write_holes(kept[0], Path(sys.argv[2]))
    return code


if __name__ == "__main__":
    sys.exit(main())
