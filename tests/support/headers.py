"""Declarations of the engine's headers in the form that cffi reads."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import cffi

from .build import ROOT

# cffi knows the types of these headers by itself.
_STANDARD = (
    "stddef.h", "stdint.h", "stdbool.h", "stdatomic.h", "stdarg.h", "stdio.h", "string.h",
    "stdlib.h", "limits.h", "float.h", "math.h", "errno.h", "pthread.h", "sys/types.h",
    "unistd.h", "time.h", "assert.h", "inttypes.h",
)
_LIMITS = "".join(
    f"#define UINT{n}_MAX {2**n - 1}u\n#define INT{n}_MAX {2**(n - 1) - 1}\n" for n in (8, 16, 32)
) + f"#define UINT64_MAX {2**64 - 1}ull\n#define SIZE_MAX UINT64_MAX\n"
_FUNCTION_BODY = re.compile(r"^\s*(?:static|inline)\b[^;{}=]*\)\s*\{", re.MULTILINE)
_ISA_HEADER = re.compile(r'#\s*include\s*[<"](?:\w*intrin|arm_neon|arm_acle|cpuid)\.h')


def public_header() -> list[Path]:
    return [ROOT / "include" / "headrace.h"]


def internal_headers() -> list[Path]:
    """Every header under engine/ that declares an interface: not those that need an instruction
    set's own types, nor the bodies that one kernel file shares with another."""
    found = sorted(h for h in (ROOT / "engine").glob("*/*.h") if h.parent.name != "windows")
    return [h for h in found if not h.name.startswith("v16_") and not h.stem.endswith("_body")
            and not _ISA_HEADER.search(h.read_text())]


@functools.cache
def _thread_types() -> str:
    """Opaque stand-ins for the pthread types, of their true sizes."""
    names = ("pthread_t", "pthread_mutex_t", "pthread_cond_t")
    prints = "".join(f'printf("{n} %zu\\n", sizeof({n}));' for n in names)
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory) / "sizes.c", Path(directory) / "sizes"
        source.write_text(f"#include <pthread.h>\n#include <stdio.h>\n"
                          f"int main(void) {{ {prints} return 0; }}\n")
        subprocess.run([*_compiler(), str(source), "-o", str(program)], check=True)
        listing = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    sizes = dict(line.split() for line in listing.splitlines())
    return "".join(f"typedef struct {{ uint64_t opaque[{int(size) // 8}]; }} {name};\n"
                   for name, size in sizes.items())


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def declarations(headers: list[Path]) -> str:
    """Preprocesses `headers` together and strips what cffi cannot parse."""
    with tempfile.TemporaryDirectory() as directory:
        stubs = Path(directory)
        contents = {"stdint.h": _LIMITS,
                    "pthread.h": f"#ifndef PTHREAD\n#define PTHREAD\n{_thread_types()}#endif\n"}
        for name in _STANDARD:
            stub = stubs / name
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(contents.get(name, ""))
        unit = stubs / "all.c"
        unit.write_text("".join(f'#include "{h}"\n' for h in headers))
        command = [
            *_compiler(), "-E", "-P", "-nostdinc", "-U__GNUC__",
            "-U__clang__", "-D__attribute__(x)=", "-D_Atomic=", "-D_Noreturn=", "-Drestrict=",
            "-Dalignas(x)=", "-D_Alignas(x)=", f"-I{stubs}", f"-I{ROOT / 'include'}",
            f"-I{ROOT / 'engine'}", str(unit),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"cannot preprocess the headers:\n{done.stderr}")
    return _drop_bodies(_drop_static_asserts(done.stdout))


def _drop_static_asserts(text: str) -> str:
    return re.sub(r"\b(?:_Static_assert|static_assert)\s*\([^;]*\)\s*;", "", text)


def _drop_bodies(text: str) -> str:
    """Removes static functions: they have no symbol to call."""
    while match := _FUNCTION_BODY.search(text):
        end = match.end() - 1
        depth = 0
        for end in range(end, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                break
        text = text[: match.start()] + text[end + 1 :]
    return text


def parse(headers: list[Path]) -> cffi.FFI:
    ffi = cffi.FFI()
    ffi.cdef(declarations(headers))
    return ffi
