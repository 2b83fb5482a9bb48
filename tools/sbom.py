"""Writes the software bill of materials, a CycloneDX 1.5 document in JSON.

    python tools/sbom.py PYPROJECT OUTPUT

The same input gives the same bytes: no time stamp, no serial number. What is listed is what the
test suite finds in the binaries and in the imports (tests/platforms/test_supply_chain.py).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

LICENCE = "Apache-2.0"


def strings(text: str, key: str) -> list[str]:
    """The array of strings `key` of a TOML document; raises ValueError when there is none."""
    found = re.search(rf"^{key}\s*=\s*(\[.*?\])\s*$", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"pyproject.toml: no array {key!r}")
    return ast.literal_eval(found[1])


def word(text: str, key: str) -> str:
    """The first string `key` of a TOML document; raises ValueError when there is none."""
    found = re.search(rf'^{key}\s*=\s*"([^"]*)"', text, re.MULTILINE)
    if not found:
        raise ValueError(f"pyproject.toml: no string {key!r}")
    return found[1]


def package(requirement: str, scope: str) -> dict[str, Any]:
    """A component from a requirement such as "numpy>=1.24"."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)[0].rstrip("-._").lower()
    return {"type": "library", "bom-ref": f"pypi/{name}", "name": name, "scope": scope,
            "purl": f"pkg:pypi/{name}",
            "properties": [{"name": "headrace:requirement", "value": requirement}]}  # fmt: skip


def own(ref: str, kind: str, version: str, description: str) -> dict[str, Any]:
    return {"type": kind, "bom-ref": ref, "name": ref, "version": version,
            "description": description, "licenses": [{"license": {"id": LICENCE}}]}  # fmt: skip


def document(pyproject: str) -> dict[str, Any]:
    """The bill of materials for the text of pyproject.toml."""
    version = word(pyproject, "version")
    runtime = strings(pyproject, "dependencies")
    makers = strings(pyproject, "requires")
    testers = strings(pyproject, "test")
    libc = {"type": "library", "bom-ref": "libc", "name": "libc", "scope": "required",
            "description": "the C library of the system, with libm and POSIX threads"}  # fmt: skip
    packages = {p["bom-ref"]: p for scope, names in (("excluded", testers), ("excluded", makers),
                                                     ("optional", runtime))
                for p in (package(name, scope) for name in names)}  # fmt: skip
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": own("headrace", "application", version, "the command")},
        "components": [
            own("libheadrace", "library", version, "the engine, C11"),
            own("headrace-python", "library", version, "the Python package headrace"),
            own("headrace-tools", "application", version, "headrace-convert and headrace-kld"),
            libc,
            *(packages[ref] for ref in sorted(packages)),
        ],
        "dependencies": [
            {"ref": "headrace", "dependsOn": ["libheadrace"]},
            {"ref": "libheadrace", "dependsOn": ["libc"]},
            {"ref": "headrace-python", "dependsOn": ["libheadrace", "pypi/numpy"]},
            {"ref": "headrace-tools", "dependsOn": ["headrace-python", *(
                package(name, "optional")["bom-ref"] for name in runtime)]},
        ],
    }


def main(argv: list[str]) -> int:
    if len(argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    text = Path(argv[1]).read_text(encoding="utf-8")
    Path(argv[2]).write_text(json.dumps(document(text), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
