"""What the program is made of: no network code, the parts that the bill of materials lists; and
containers that ordinary tools can check."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.build import ROOT
from support.platforms import need, run

# Sockets and names; and whatever could bring them in: loading libraries, starting programs.
FORBIDDEN = set("""
socket socketpair connect bind listen accept accept4 send sendto sendmsg sendmmsg recv recvfrom
recvmsg recvmmsg shutdown getsockopt setsockopt getsockname getpeername getaddrinfo getnameinfo
gethostbyname gethostbyname_r gethostbyaddr getservbyname getifaddrs if_nametoindex res_init
res_query inet_addr inet_pton inet_aton syslog openlog dlopen dlmopen dlsym system popen fork vfork
execve execv execvp execvpe execl execlp fexecve posix_spawn posix_spawnp syscall
""".split())
NETWORK_MODULES = set("""
socket ssl http urllib ftplib smtplib poplib imaplib telnetlib xmlrpc socketserver asyncio
webbrowser requests httpx aiohttp urllib3 huggingface_hub
""".split())
C_LIBRARY = re.compile(r"lib(c|m|pthread)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")


def undefined(*files: Path, dynamic: bool = True) -> set[str]:
    """Names that the files need from elsewhere."""
    out = run(["nm", *(["-D"] if dynamic else []), "--undefined-only", *files])
    return {line.split()[-1].split("@")[0] for line in out.splitlines() if " U " in f" {line} "}


def bill(build_dir: Path) -> dict:
    return json.loads((build_dir / "headrace.cdx.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def tools():
    need(["nm", "readelf"], "binutils")


@pytest.mark.parametrize("name", ["headrace", "libheadrace.so"])
def test_no_network_code(name, build_dir):
    names = undefined(build_dir / name)
    assert "pread64" in names or "pread" in names, "nm shows what is used"
    assert not names & FORBIDDEN


def test_no_network_code_in_any_object(build_dir):
    """Also what the linker would leave out."""
    names = undefined(build_dir / "libheadrace.a", dynamic=False)
    assert "pthread_create" in names
    assert not names & FORBIDDEN


def imported(folder: Path) -> set[str]:
    """First names of all absolute imports of the Python files in a folder."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    return found


def test_no_network_module_in_python():
    names = imported(ROOT / "python") | imported(ROOT / "tools")
    assert {"numpy", "ctypes"} <= names
    assert not names & NETWORK_MODULES


def test_bill_of_materials_is_true(build_dir):
    """Each library that a binary needs and each package that Python code imports is listed."""
    listed = {c["name"].replace("-", "_"): c for c in bill(build_dir)["components"]}
    for name in ("headrace", "libheadrace.so"):
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run(["readelf", "-d", build_dir / name]))
        assert needed and all(C_LIBRARY.fullmatch(n) for n in needed), needed
    assert "libc" in listed
    ours = {"headrace", "headrace_tools"}
    foreign = (imported(ROOT / "python") | imported(ROOT / "tools")) - ours - set(sys.stdlib_module_names)
    assert {"numpy", "tqdm"} <= foreign <= set(listed), foreign
    for name in ("numpy", "tqdm"):
        assert listed[name]["scope"] == "optional" and listed[name]["purl"] == f"pkg:pypi/{name}"


def test_bill_of_materials_holds_together(build_dir):
    """Every reference resolves, nothing is listed twice, and the version is the program's."""
    document = bill(build_dir)
    root = document["metadata"]["component"]
    refs = [c["bom-ref"] for c in document["components"]] + [root["bom-ref"]]
    assert len(refs) == len(set(refs))
    edges = {d["ref"]: d["dependsOn"] for d in document["dependencies"]}
    assert {r for targets in edges.values() for r in targets} | set(edges) <= set(refs)
    assert edges["libheadrace"] == ["libc"], "the engine needs nothing but the C library"
    assert run([build_dir / "headrace", "version"]) == f"headrace {root['version']}\n"


@pytest.fixture
def container(scored, tmp_path) -> Path:
    """A copy to tamper with: the one with the most kinds of files."""
    return Path(shutil.copytree(scored["qwen4_exp"].path, tmp_path / "model"))


def check(container: Path) -> subprocess.CompletedProcess:
    return subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "manifest.sha256"],
                          cwd=container, capture_output=True, text=True)  # fmt: skip


def test_sha256sum_checks_every_file(container):
    need(["sha256sum"], "coreutils")
    assert check(container).returncode == 0
    names = {p.name for p in container.iterdir()} - {"manifest.sha256"}
    assert {"manifest.json", "trunk.bin", "codebooks.bin", "ngram.bin"} <= names
    listed = (container / "manifest.sha256").read_text().splitlines()
    assert {line[66:] for line in listed} == names
    for name in sorted(names):
        path = container / name
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        done = check(container)
        assert done.returncode != 0 and f"{name}: FAILED" in done.stdout, name
        path.write_bytes(before)
    assert check(container).returncode == 0


def test_detached_signature(container, headrace_bin, tmp_path):
    """As docs/airgap.md says; and that each way of cheating is found."""
    need(["ssh-keygen"], "openssh-client")
    key, listed = tmp_path / "key", container / "manifest.sha256"
    namespace = ["-n", "headrace-container"]

    def keygen(*args: object, text: bytes = b"") -> int:
        return subprocess.run(["ssh-keygen", *map(str, args)], input=text,
                              capture_output=True).returncode  # fmt: skip

    def accepted(name: str = "models@example") -> bool:
        return keygen("-Y", "verify", "-f", tmp_path / "signers", "-I", name, *namespace,
                      "-s", f"{listed}.sig", text=listed.read_bytes()) == 0

    assert keygen("-q", "-t", "ed25519", "-N", "", "-C", "models@example", "-f", key) == 0
    assert keygen("-q", "-Y", "sign", "-f", key, *namespace, listed) == 0
    public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
    (tmp_path / "signers").write_text(f"models@example {public}\n")
    assert accepted() and not accepted("someone@example")
    run([headrace_bin, "verify", container])  # the signature in the directory disturbs nobody
    assert check(container).returncode == 0

    before = listed.read_bytes()
    listed.write_bytes(before.replace(b"0", b"1", 1))
    assert not accepted(), "a changed list"
    listed.write_bytes(before)
    other = tmp_path / "other"
    assert keygen("-q", "-t", "ed25519", "-N", "", "-C", "models@example", "-f", other) == 0
    Path(f"{listed}.sig").unlink()
    assert keygen("-q", "-Y", "sign", "-f", other, *namespace, listed) == 0
    assert not accepted(), "another key"
