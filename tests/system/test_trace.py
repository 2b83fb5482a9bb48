"""`headrace trace`: the routes of a text, as the engine chose them."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
from pathlib import Path

import pytest
from support.injection import preload

TEXT = "The captain stood upon the deck and looked at the sea, and said nothing at all."


def trace(binary, *args, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(binary), "trace", *map(str, args)], input=stdin,
                          capture_output=True, timeout=900)


@pytest.fixture(scope="module")
def recorded(headrace_bin, model_dir, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    done = trace(headrace_bin, model_dir, "-f", "-", "-o", path, stdin=TEXT.encode())
    assert done.returncode == 0 and done.stdout == b"", done.stderr
    return path


def lines(path: Path) -> tuple[dict, list[dict]]:
    head, *tokens = [json.loads(line) for line in path.read_text().splitlines()]
    return head["headrace"], tokens


def test_routes_are_those_of_the_engine(recorded, headrace, model_dir) -> None:
    head, tokens = lines(recorded)
    with headrace.Model(model_dir, ram="64MiB") as model:
        ids = model.tokenize(TEXT, special=True)
        routes, _ = model.routes(ids)
        info = model.info
    assert [t["tok"] for t in tokens] == list(range(len(ids)))
    for t, token in enumerate(tokens):
        assert token["layers"] == [layer[t].tolist() for layer in routes]
    assert head == {"format": 2, "version": headrace.version(), "name": info.name, "moe_layers": info.moe_layers,
                    "container_sha256": info.container_sha256, "experts": info.experts,
                    "top_k": info.top_k, "record_bytes": info.record_bytes}


@pytest.mark.plain_build  # in a few megabytes, which a checker adds to
def test_chunk_and_memory_change_nothing(recorded, headrace_bin, model_dir, tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    done = trace(headrace_bin, model_dir, "-f", "-", "-o", path, "--chunk", 3, "--ram", "12MiB",
                 "--threads", 2, stdin=TEXT.encode())
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == recorded.read_bytes()


def test_guesses(recorded, headrace, headrace_bin, model_dir, tmp_path) -> None:
    """The next layer's router likes much of what it will choose; without the option nothing is written."""
    whole, _ = tmp_path / "whole", tmp_path / "part"
    for path, ahead, extra in ((whole, 64, []), (tmp_path / "part", 2, ["--chunk", 3])):
        done = trace(headrace_bin, model_dir, "-f", "-", "-o", path, "--read-ahead", ahead, *extra,
                     stdin=TEXT.encode())
        assert done.returncode == 0, done.stderr
    (head, tokens), (short, part), (_, plain) = lines(whole), lines(tmp_path / "part"), lines(recorded)
    top_k = head["top_k"]
    assert head["read_ahead"] == top_k and short["read_ahead"] == 2
    assert not any("ahead" in t for t in plain)
    found = asked = 0
    for t, p, q in zip(tokens, part, plain, strict=True):
        assert t["layers"] == p["layers"] == q["layers"]
        assert t["ahead"][0] == [] and all(len(set(one)) == top_k for one in t["ahead"][1:])
        assert p["ahead"] == [one[:2] for one in t["ahead"]]
        for guess, used in zip(t["ahead"][1:], t["layers"][1:]):
            found += len(set(guess) & set(used))
            asked += top_k
    assert 0.5 < found / asked < 1, "chance would be an eighth"


def test_ids_to_standard_output(recorded, headrace, headrace_bin, model_dir, tmp_path) -> None:
    with headrace.Model(model_dir, ram="64MiB") as model:
        ids = model.tokenize(TEXT, special=True)
    (tmp_path / "ids").write_text(" ".join(map(str, ids)))
    done = trace(headrace_bin, model_dir, "--ids", tmp_path / "ids", "--tokens", 5)
    assert done.returncode == 0
    assert done.stdout == b"".join(recorded.read_bytes().splitlines(keepends=True)[:6])


def test_a_text_longer_than_the_context_starts_again(headrace, headrace_bin, model_dir, tmp_path) -> None:
    (tmp_path / "ids").write_text("5 6 7 " * 4)
    done = trace(headrace_bin, model_dir, "--ids", tmp_path / "ids", "--ctx", 3)
    assert done.returncode == 0, done.stderr
    tokens = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    assert len(tokens) == 12
    assert [t["layers"] for t in tokens[3:6]] == [t["layers"] for t in tokens[:3]]


def test_summary(headrace_bin, model_dir, tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    done = trace(headrace_bin, model_dir, "-f", "-", "-o", path, "--json", stdin=TEXT.encode())
    summary = json.loads(done.stdout)
    assert summary["trace"] == str(path)
    assert summary["tokens"] == len(path.read_text().splitlines()) - 1


@pytest.mark.parametrize("args, code, text", [
    (["-f", "x", "--ids", "y"], 2, "-f FILE or --ids FILE"),
    ([], 2, "-f FILE or --ids FILE"),
    (["-f", "absent"], 5, "absent"),
    (["--ids", "/dev/null"], 3, "no token"),
    (["-f", "-", "--json"], 2, "-o FILE"),
    (["-f", "-", "-o", "/dev/full"], 5, "/dev/full"),
    (["-f", "-", "-o", "absent/trace"], 5, "absent/trace"),
])
def test_faults(headrace_bin, model_dir, args: list[str], code: int, text: str) -> None:
    done = trace(headrace_bin, model_dir, *args, stdin=TEXT.encode())
    assert done.returncode == code and text in done.stderr.decode()


def test_a_trace_is_whole_or_not_there(recorded, headrace_bin, build_dir, model_dir, tmp_path) -> None:
    """A file of lines that was cut would pass for a shorter one: the old one stays until the new is whole."""
    path = tmp_path / "trace.jsonl"
    path.write_text("old\n")
    command = [str(headrace_bin), "trace", str(model_dir), "-f", "-", "-o", str(path)]

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    # Python ignores SIGXFSZ, and so does what it starts with its signals as they are.
    done = subprocess.run(command, input=TEXT.encode(), capture_output=True, preexec_fn=small_files,
                          restore_signals=False)
    assert done.returncode == 5 and os.strerror(errno.EFBIG) in done.stderr.decode(), done.stderr
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path]
    env = preload(build_dir)
    for fault, code in (("fsync", 5), ("rename", 5), ("kill", -9)) if env else ():
        calls, action = ("rename", fault) if fault == "kill" else (fault, "errno:5")
        env["HEADRACE_TEST_FAULT"] = f"calls={calls} path={tmp_path} action={action}"
        done = subprocess.run(command, input=TEXT.encode(), capture_output=True, env=env)
        assert done.returncode == code, done.stderr
        assert path.read_text() == "old\n"
        assert fault == "kill" or list(tmp_path.iterdir()) == [path]
    done = trace(headrace_bin, model_dir, "-f", "-", "-o", path, stdin=TEXT.encode())
    assert done.returncode == 0 and path.read_bytes() == recorded.read_bytes()
    assert list(tmp_path.iterdir()) == [path]
