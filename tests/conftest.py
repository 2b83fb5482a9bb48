"""Fixtures of the whole suite: a fresh build, the internals through cffi, converted models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT / "tests", ROOT / "python", ROOT / "tools"):
    sys.path.insert(0, str(folder))

from support import build as building  # noqa: E402
from support import headers  # noqa: E402

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests that
# interrupt a command would wait in vain.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes, and to be made, says something about the machine only.
# The same examples in every run: a change decides whether a test fails, not chance. New ones are
# looked for with --hypothesis-profile=explore.
settings.register_profile("suite", deadline=None, suppress_health_check=list(HealthCheck),
                          derandomize=True)
settings.register_profile("explore", settings.get_profile("suite"), derandomize=False)
settings.load_profile("suite")

CHECKPOINT = ROOT / "models" / "tiny-qwen3.5-moe"
FIXTURES = ROOT / "tests" / "fixtures"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--build-dir", default=None,
        help="meson build directory to use (default: build/ of the checkout; made when missing)",
    )
    parser.addoption(
        "--no-build", action="store_true",
        help="take the build directory as it is (a sanitizer build, another compiler)",
    )


@pytest.fixture(scope="session")
def build_dir(pytestconfig: pytest.Config) -> Path:
    """The meson build directory, up to date with the sources."""
    chosen = pytestconfig.getoption("--build-dir") or os.environ.get("HEADRACE_BUILD")
    directory = Path(chosen).resolve() if chosen else ROOT / "build"
    if not pytestconfig.getoption("--no-build"):
        try:
            building.build(directory)
        except RuntimeError as failure:
            pytest.exit(str(failure), returncode=1)
    os.environ["HEADRACE_TEST_LIBRARY"] = str(building.shared_library(directory, "headrace"))
    return directory


@pytest.fixture(scope="session")
def lib(build_dir: Path):
    """(ffi, C): every declaration of headrace.h and engine/*/*.h, and the test library."""
    ffi = headers.parse(headers.public_header() + headers.internal_headers())
    return ffi, ffi.dlopen(str(building.shared_library(build_dir, "headrace_test")))


@pytest.fixture(scope="session")
def headrace_bin(build_dir: Path) -> Path:
    """The `headrace` command."""
    return build_dir / "headrace"


@pytest.fixture(scope="session")
def headrace(build_dir: Path):
    """The Python package, on the library of this build."""
    import headrace as package

    package.use_library(building.shared_library(build_dir, "headrace"))
    return package


# The converter checks its result with the engine: the one that is tested.
CONVERT = """
import os, sys
import headrace
if library := os.environ.get("HEADRACE_TEST_LIBRARY"):
    headrace.use_library(library)
from headrace_tools.convert.cli import main
sys.exit(main())
"""


def convert(source: Path, destination: Path, *options: str) -> Path:
    """Converts a checkpoint with headrace-convert in a process of its own."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tools"), str(ROOT / "python")])
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, str(source), str(destination), *options],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    assert done.returncode == 0, f"headrace-convert {source} failed:\n{done.stdout}"
    return destination


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint, experts and trunk in int8."""
    return convert(CHECKPOINT, tmp_path_factory.mktemp("int8") / "model",
                   "--experts", "int8", "--trunk", "int8")


@pytest.fixture(scope="session")
def model_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint, experts and trunk in bf16."""
    return convert(CHECKPOINT, tmp_path_factory.mktemp("bf16") / "model",
                   "--experts", "bf16", "--trunk", "bf16")


@pytest.fixture(scope="session")
def fixture_models(tmp_path_factory: pytest.TempPathFactory):
    """Callable: name of an oracle fixture -> its container (ids only), converted once.

    The codec rounds nothing: bf16, and f32 for what bf16 cannot hold; with experts "auto", those of a
    4-bit source as they are.
    """
    base = tmp_path_factory.mktemp("fixtures")
    done: dict[tuple[str, str], Path] = {}

    def container(name: str, experts: str = "bf16") -> Path:
        key = name, experts
        if key not in done:
            done[key] = convert(FIXTURES / name, base / f"{name}-{experts}", "--experts", experts,
                                "--trunk", "bf16", "--no-tokenizer")
        return done[key]

    return container
