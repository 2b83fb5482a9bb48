"""The `headrace` command: options, exit codes, JSON, streaming, interruption."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from support.processes import SMALL_PIPE, until, until_interruptible

ROOT = Path(__file__).resolve().parents[2]
VAL = ROOT / "models" / "val.txt"
PROMPT = "The captain stood upon the deck and looked at the sea, and"


class Command:
    def __init__(self, binary: Path):
        self.binary = str(binary)

    def __call__(self, *args, stdin: bytes = b"", timeout: float = 900,
                 cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([self.binary, *map(str, args)], input=stdin, capture_output=True,
                              timeout=timeout, cwd=cwd)

    def json(self, *args, code: int = 0, **options) -> dict:
        done = self(*args, "--json", **options)
        assert done.returncode == code, done.stderr.decode()
        assert done.stdout.count(b"\n") >= 1
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def headrace_cmd(headrace_bin):
    return Command(headrace_bin)


# ---- usage ------------------------------------------------------------------------------------

@pytest.mark.parametrize("args", [
    [], ["frobnicate"], ["run"], ["run", "MODEL"], ["run", "MODEL", "-p"],
    ["run", "MODEL", "-p", "x", "--bogus"], ["run", "MODEL", "-p", "x", "--bogus=1"],
    ["run", "MODEL", "MODEL", "-p", "x"], ["run", "MODEL", "-", "-p", "x"],
    ["run", "MODEL", "-p", "x", "--ids", "1"], ["run", "MODEL", "-p", "x", "-f", "y"],
    ["run", "MODEL", "-p", "x", "--json=yes"],
    *[["run", "MODEL", "-p", "x", option, value] for option, value in [
        ("--ram", "8Q"), ("--ram", "-1GiB"), ("--ram", "1.5"), ("--ram", ""),
        ("--ram", "99999999TiB"), ("--threads", "two"), ("--threads", "-1"), ("--threads", "1.5"),
        ("--threads", "4294967296"), ("--ctx", "0x10"), ("--seed", "18446744073709551616"),
        ("--seed", "-1"), ("--temp", "hot"), ("--temp", "nan"), ("--temp", "inf"),
        ("--top-p", "0.9x"), ("--cache", "fifo"), ("--cache", ""), ("--verify", "FIRST"),
        ("--isa", "sse"), ("-n", "many"), ("--ids", "x")]],
    ["score", "MODEL"], ["score", "MODEL", "-f", "x", "--window", "0"],
    ["score", "MODEL", "-f", "x", "--window", "64", "--ctx", "32"],
    ["score", "MODEL", "-f", "x", "--special", "--no-special"],
    ["inspect"], ["verify"], ["plan"], ["verify", "MODEL", "--ram", "1GiB"],
    ["run", "MODEL", "-f", ""], ["score", "MODEL", "-f", ""], ["doctor", "MODEL", "--trace", ""],
    ["run", "MODEL", "-p", "x", "--usage", ""], ["bench", "MODEL", "--ids", ""],
], ids=" ".join)
def test_usage_errors_exit_2_before_anything_is_opened(headrace_cmd, args):
    done = headrace_cmd(*args)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr


@pytest.mark.parametrize("settings", [
    ["--temp", "-1"], ["--top-p", "0"], ["--top-p", "1.1"], ["--min-p", "1"],
    ["--repeat-penalty", "0"], ["--stop", ""], ["--stop", "x" * 257], ["--ids", "1 2 4096"],
    ["--ctx", "4000000000"],
], ids=lambda s: " ".join(s)[:30])
def test_values_the_engine_refuses_exit_2(headrace_cmd, model_dir, settings):
    prompt = [] if "--ids" in settings else ["-p", PROMPT]
    assert headrace_cmd("run", model_dir, *prompt, *settings).returncode == 2


def test_help_and_version(headrace_cmd):
    for args in (["help"], ["--help"], ["-h"], ["run", "--help"], ["doctor", "-h"]):
        done = headrace_cmd(*args)
        assert done.returncode == 0 and b"usage: headrace" in done.stdout
    done = headrace_cmd("version")
    assert done.returncode == 0 and done.stdout.startswith(b"headrace ")
    assert headrace_cmd("--version").stdout == done.stdout
    assert headrace_cmd.json("info")["version"] == done.stdout.split()[1].decode()


# ---- run --------------------------------------------------------------------------------------

def test_text_to_stdout_and_everything_else_to_stderr(headrace_cmd, model_dir):
    done = headrace_cmd("run", model_dir, "-p", PROMPT, "-n", 20)
    assert done.returncode == 0
    collected = headrace_cmd.json("run", model_dir, "-p", PROMPT, "-n", 20)
    assert done.stdout.decode() == collected["text"]
    assert b"length" in done.stderr and b"tokens/s" in done.stderr
    assert collected["tokens"] == len(collected["ids"]) == len(collected["logprobs"]) == 20
    assert collected["finish"] == "length"
    assert all(p <= 0 for p in collected["logprobs"])
    stats = collected["stats"]
    assert stats["tokens_prefilled"] == collected["prompt_tokens"]
    assert stats["tokens_decoded"] == 19
    assert stats["leases"] == 0
    assert collected["model"]["vocab_size"] == 4096


def test_prompt_from_file_stdin_and_ids(headrace_cmd, model_dir, tmp_path):
    want = headrace_cmd.json("run", model_dir, "-p", PROMPT, "-n", 8)
    file = tmp_path / "pro mpt.txt"
    file.write_bytes(PROMPT.encode())
    assert headrace_cmd.json("run", model_dir, "-f", file, "-n", 8)["ids"] == want["ids"]
    for source in (["-"], ["-f", "-"]):
        got = headrace_cmd.json("run", model_dir, *source, "-n", 8, stdin=PROMPT.encode())
        assert got["ids"] == want["ids"]
    by_ids = headrace_cmd.json("run", model_dir, "--ids", "1 2,3\n4", "-n", 3)
    assert by_ids["prompt_tokens"] == 4


def test_stdin_is_taken_byte_for_byte(headrace_cmd, model_dir, tmp_path):
    data = b"a\r\nb\x00c\x1a\n\n \xff\xfe d"
    file = tmp_path / "p"
    file.write_bytes(data)
    piped = headrace_cmd.json("run", model_dir, "-", "-n", 4, stdin=data)
    read = headrace_cmd.json("run", model_dir, "-f", file, "-n", 4)
    cut = headrace_cmd.json("run", model_dir, "-", "-n", 4, stdin=data[:4])
    assert piped["ids"] == read["ids"]
    assert piped["prompt_tokens"] == read["prompt_tokens"] > cut["prompt_tokens"]


@pytest.mark.parametrize("args,stdin", [(["-p", ""], b""), (["-"], b""), (["--ids", " "], b"")])
def test_empty_prompt(headrace_cmd, model_dir, args, stdin):
    done = headrace_cmd("run", model_dir, *args, stdin=stdin)
    assert done.returncode == 2 and b"empty" in done.stderr


def test_seed_decides(headrace_cmd, model_dir):
    def run(seed):
        return headrace_cmd.json("run", model_dir, "-p", PROMPT, "-n", 16, "--temp", "0.9",
                                 "--top-k", 40, "--top-p", "0.95", "--seed", seed)["ids"]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert run(2**64 - 1) == run(2**64 - 1)


def test_settings_change_nothing_in_the_result(headrace_cmd, model_dir):
    base = ["run", model_dir, "-p", PROMPT, "-n", 12, "--temp=0.8", "--seed=5"]
    want = headrace_cmd.json(*base)["ids"]
    for extra in (["--threads", "1"], ["--isa", "reference"], ["--no-direct"], ["--chunk", "3"],
                  ["--cache", "lru"], ["--cache", "lfu"], ["--verify", "always"],
                  ["--io-threads", "1"], ["--ctx", "128"]):
        assert headrace_cmd.json(*base, *extra)["ids"] == want, extra


def test_kernels_are_named_as_the_library_names_them(headrace_cmd, model_dir):
    """Every name that the library gives, and no other: those are listed."""
    names = headrace_cmd.json("info")["isa"]
    assert names[-1] == "reference"
    for name in names:
        assert headrace_cmd.json("info", model_dir, "--isa", name)["model"]["isa"] == name
    assert headrace_cmd.json("info", model_dir, "--isa", "auto")["model"]["isa"] == names[0]
    for command in (("info", model_dir), ("plan", model_dir)):
        done = headrace_cmd(*command, "--isa", "avx")
        assert done.returncode == 2 and "give " + "|".join(["auto", *names]) in done.stderr.decode()
    done = headrace_cmd("bench", "--kernels", "--isa", "avx")
    assert done.returncode == 2 and "available: " + " ".join(names) in done.stderr.decode()


def test_stop_strings(headrace_cmd, model_dir):
    free = headrace_cmd.json("run", model_dir, "-p", PROMPT, "-n", 20)
    stop = free["text"][8:12]
    args = ["run", model_dir, "-p", PROMPT, "-n", 20, "--stop", "never seen", "--stop", stop]
    got = headrace_cmd.json(*args)
    assert (got["finish"], got["stop_string"]) == ("stop", 1)
    assert got["text"] == free["text"][: free["text"].index(stop)]
    assert headrace_cmd(*args).stdout.decode() == got["text"]
    seventeen = [word for i in range(17) for word in ("--stop", f"s{i}")]
    assert headrace_cmd("run", model_dir, "-p", "x", *seventeen).returncode == 2


def test_context_end_is_a_finish_and_too_long_a_prompt_an_error(headrace_cmd, model_dir):
    full = headrace_cmd.json("run", model_dir, "-p", PROMPT, "-n", 0, "--ctx", 32)
    assert full["finish"] in ("context", "stop")
    error = headrace_cmd.json("run", model_dir, "-p", PROMPT * 10, "--ctx", 32, code=2)["error"]
    assert error["code"] == "context" and "32" in error["detail"]


def test_control_tokens_only_when_asked(headrace_cmd, model_dir):
    text = "a<|im_end|>b"
    plain = headrace_cmd.json("run", model_dir, "-p", text, "-n", 1)["prompt_tokens"]
    special = headrace_cmd.json("run", model_dir, "-p", text, "-n", 1, "--special")["prompt_tokens"]
    assert special == 3 < plain


def test_sampled_text_is_valid_utf8_and_json(headrace_cmd, model_dir):
    args = ["run", model_dir, "-p", PROMPT, "-n", 80, "--temp", "50"]
    for seed in range(3):
        got = headrace_cmd.json(*args, "--seed", seed)
        assert headrace_cmd(*args, "--seed", seed).stdout.decode("utf-8") == got["text"]


def test_ids_only_container_prints_ids(headrace_cmd, fixture_models):
    path = fixture_models("qwen3_5_moe")
    got = headrace_cmd.json("run", path, "--ids", "1 2 3", "-n", 4, "--ctx", 32)
    printed = headrace_cmd("run", path, "--ids", "1 2 3", "-n", 4, "--ctx", 32).stdout
    assert [int(w) for w in printed.split()] == got["ids"]
    assert headrace_cmd("run", path, "-p", "text", "--ctx", 32).returncode == 3


# ---- errors and exit codes --------------------------------------------------------------------

def test_missing_things_name_the_path_as_given(headrace_cmd, model_dir, tmp_path):
    for args in (["run", "no/such model ž", "-p", "x"], ["inspect", "no/such model ž"],
                 ["verify", "no/such model ž"], ["plan", "no/such model ž"],
                 ["info", "no/such model ž"]):
        done = headrace_cmd(*args, cwd=tmp_path)
        assert done.returncode in (3, 5), args
        assert "no/such model ž" in done.stderr.decode()
    done = headrace_cmd("run", model_dir, "-f", tmp_path / "missing.txt")
    assert done.returncode == 5 and b"missing.txt" in done.stderr
    assert headrace_cmd("run", model_dir, "-f", tmp_path).returncode == 5  # a directory


def test_below_the_floor_exits_4_and_names_it(headrace_cmd, model_dir):
    plan = headrace_cmd.json("plan", model_dir)
    assert plan["fits"] and plan["total"] <= plan["ram"]
    floor = plan["floor"]
    short = headrace_cmd.json("plan", model_dir, "--ram", floor - 1, code=4)
    assert not short["fits"] and short["floor"] == floor
    done = headrace_cmd("run", model_dir, "-p", "x", "-n", 1, "--ram", floor - 1)
    assert done.returncode == 4 and str(floor) in done.stderr.decode()
    assert headrace_cmd("run", model_dir, "-p", "x", "-n", 1, "--ram", floor).returncode == 0


@pytest.fixture
def damaged(model_dir, tmp_path):
    """A copy of the container with one flipped bit in the middle of a file."""
    def make(name: str) -> Path:
        copy = tmp_path / "damaged"
        shutil.copytree(model_dir, copy)
        target = sorted(copy.glob(name))[0]
        data = bytearray(target.read_bytes())
        data[len(data) // 2] ^= 0x10
        os.chmod(target, 0o600)
        target.write_bytes(data)
        return copy

    return make


@pytest.mark.parametrize("name", ["manifest.json", "trunk.bin", "experts-*.bin", "tokenizer.bin"])
def test_verify_finds_a_flipped_bit(headrace_cmd, damaged, name):
    path = damaged(name)
    got = headrace_cmd.json("verify", path, code=3)
    assert got["ok"] is False
    texts = " ".join(got["faults"]) + got["error"]["detail"]
    assert name.split("*")[0] in texts
    done = headrace_cmd("verify", path)
    assert done.returncode == 3
    if name != "experts-*.bin":  # records are read when they are needed
        assert headrace_cmd("run", path, "-p", "x", "-n", 1).returncode == 3


def test_verify_of_a_sound_container(headrace_cmd, model_dir):
    got = headrace_cmd.json("verify", model_dir)
    assert got["ok"] is True and got["faults"] == [] and got["fault_count"] == 0
    files = sum(f.stat().st_size for f in Path(model_dir).iterdir())
    assert 0.9 * files < got["bytes"] <= files


def test_error_objects_are_json(headrace_cmd, tmp_path):
    error = headrace_cmd.json("plan", tmp_path, code=3)["error"]
    assert set(error) == {"code", "detail"} and error["detail"]


def test_paths_of_every_kind(headrace_cmd, model_dir, tmp_path):
    odd = tmp_path / "mo del" / "モデル" / "ž"
    odd.parent.mkdir(parents=True)
    shutil.copytree(model_dir, odd)
    for path in (str(odd), str(odd) + "/", "./モデル/ž", "モデル/../モデル/ž"):
        got = headrace_cmd.json("run", path, "-p", "x", "-n", 1, cwd=tmp_path / "mo del")
        assert got["tokens"] == 1
    dashed = tmp_path / "--json"
    dashed.symlink_to(odd)
    assert headrace_cmd("inspect", "--", "--json", cwd=tmp_path).returncode == 0


# ---- inspect, plan, info ----------------------------------------------------------------------

def test_inspect(headrace_cmd, model_dir):
    text = headrace_cmd("inspect", model_dir).stdout.decode()
    for word in ("delta", "attention", "moe", "int8", "32 experts", "4 for each token", "floor",
                 "recommended", "working set"):
        assert word in text, word
    got = headrace_cmd.json("inspect", model_dir)
    manifest = json.loads((Path(model_dir) / "manifest.json").read_text())
    assert got["manifest"] == manifest
    listed = (Path(model_dir) / "manifest.sha256").read_text()
    assert f"{got['container_sha256']}  manifest.json" in listed
    assert got["plan"]["total_experts"] == 8 * 32
    assert got["plan"]["working_set"] == 8 * 4 * got["plan"]["record_bytes"]


def test_plan_sizes(headrace_cmd, model_dir):
    plan = headrace_cmd.json("plan", model_dir, "--ram", "1GiB")
    assert plan["ram"] == 2**30
    assert plan["total"] == sum(plan[k] for k in ("trunk", "state", "scratch", "io", "overhead",
                                                  "cache"))
    assert headrace_cmd.json("plan", model_dir, "--ram", "0.5GiB")["ram"] == 2**29
    assert headrace_cmd.json("plan", model_dir, "--ram=2097152KiB")["ram"] == 2**31


def test_info_tells_kernels_and_reading_mode(headrace_cmd, model_dir):
    got = headrace_cmd.json("info", model_dir, "--isa", "reference", "--threads", "1")["model"]
    assert got["isa"] == "reference" and got["threads"] == 1
    assert got["io_mode"].startswith(("direct", "buffered", "mixed"))
    assert got["tokenizer"] is True and 4095 in got["stop_ids"]


# ---- score ------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def small_text(tmp_path_factory):
    """3,000 bytes of the validation text around the end of a document."""
    data = VAL.read_bytes()
    at = data.index(b"<|endoftext|>")
    path = tmp_path_factory.mktemp("score") / "small.txt"
    path.write_bytes(data[at - 2000:at + 1000])
    return path


def test_score_counts_and_figures(headrace_cmd, model_bf16, small_text):
    got = headrace_cmd.json("score", model_bf16, "-f", small_text, "--window", 64, "--hash")
    assert got["predictions"] == got["tokens"] - 1
    assert got["perplexity"] == pytest.approx(math.exp(got["mean_nll"]))
    bits = got["mean_nll"] * got["predictions"] / math.log(2) / small_text.stat().st_size
    assert got["bits_per_byte"] == pytest.approx(bits)
    assert 10 < got["perplexity"] < 400
    assert len(got["logits_sha256"]) == 64
    again = headrace_cmd.json("score", model_bf16, "-f", small_text, "--window", 64, "--hash",
                              "--threads", 1, "--chunk", 5)
    assert again["logits_sha256"] == got["logits_sha256"]
    assert again["mean_nll"] == got["mean_nll"]
    other = headrace_cmd.json("score", model_bf16, "-f", small_text, "--window", 65, "--hash")
    assert other["logits_sha256"] != got["logits_sha256"]
    text = headrace_cmd("score", model_bf16, "-f", small_text, "--window", 64, "--hash").stdout
    assert got["logits_sha256"] in text.decode()


def test_score_equals_the_logits_of_the_library(headrace_cmd, headrace, model_bf16, small_text):
    """Windows from a fresh state, the last one partial, every position scored."""
    import hashlib

    import numpy as np

    window, hashed, nll = 96, hashlib.sha256(), 0.0
    with headrace.Model(model_bf16, ctx=window) as model:
        ids = model.tokenize(small_text.read_text(encoding="utf-8"), special=True)
        for at in range(0, len(ids) - 1, window):
            inputs, targets = ids[at:at + window], ids[at + 1:at + window + 1]
            logits = np.asarray(model.logits(inputs[: len(targets)]), "<f4")
            hashed.update(logits.tobytes())
            wide = logits.astype(np.float64)
            top = wide.max(axis=1)
            losses = np.log(np.exp(wide - top[:, None]).sum(axis=1)) + top
            nll += (losses - wide[np.arange(len(targets)), targets]).sum()
    got = headrace_cmd.json("score", model_bf16, "-f", small_text, "--window", window, "--hash")
    assert got["tokens"] == len(ids)
    assert got["logits_sha256"] == hashed.hexdigest()
    assert got["mean_nll"] == pytest.approx(nll / (len(ids) - 1), rel=1e-9)


@pytest.mark.parametrize("model,tolerance", [("model_bf16", 0.01), ("model_dir", 0.03)])
def test_score_of_the_validation_text(headrace_cmd, request, model, tolerance):
    """The figure of the checkpoint's README: float32 compute, 54,133 predictions."""
    got = headrace_cmd.json("score", request.getfixturevalue(model), "-f", VAL, "--window", 512,
                            "--end", "<|endoftext|>")
    assert got["predictions"] == 54133
    assert got["perplexity"] == pytest.approx(52.118, rel=tolerance)
    assert got["bits_per_byte"] == pytest.approx(1.4967, rel=tolerance)


def test_score_control_tokens_and_end(headrace_cmd, model_dir, small_text):
    score = ["score", model_dir, "-f", small_text, "--window", 128]
    default = headrace_cmd.json(*score)
    assert headrace_cmd.json(*score, "--special")["tokens"] == default["tokens"]
    assert headrace_cmd.json(*score, "--no-special")["tokens"] > default["tokens"]
    ended = headrace_cmd.json(*score, "--end", "<|endoftext|>")
    assert ended["tokens"] == default["tokens"] + 1


def test_score_of_ids(headrace_cmd, fixture_models, tmp_path):
    path = fixture_models("qwen3_5_moe")
    file = tmp_path / "ids"
    file.write_text("1 2 3 4 5\n6 7")
    got = headrace_cmd.json("score", path, "-f", file, "--ids", "--window", 4)
    assert (got["tokens"], got["predictions"], got["bits_per_byte"]) == (7, 6, None)
    for bad in ("", "1", "1 x", "1 99999999", "1 2 2147483648", "-1 2"):
        file.write_text(bad)
        assert headrace_cmd("score", path, "-f", file, "--ids", "--window", 4).returncode == 3, bad


# ---- streams and signals ----------------------------------------------------------------------

def start(headrace_cmd, *args, **options) -> subprocess.Popen:
    return subprocess.Popen([headrace_cmd.binary, *map(str, args)],
                            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
                               "pipesize": SMALL_PIPE, **options})


# More text than a small pipe holds: it does not end unless it is read.
ENDLESS = ["-n", 0, "--ctx", 2048, "--temp", "1", "--seed", 1]


@pytest.mark.skipif(sys.platform != "linux", reason="needs sockets that keep writes apart")
def test_text_streams_token_by_token(headrace_cmd, model_dir):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_PIPE)
    with ours, theirs:
        process = start(headrace_cmd, "run", model_dir, "-p", PROMPT, *ENDLESS, stdout=theirs)
        theirs.close()
        writes = [ours.recv(4096) for _ in range(20)]
        assert all(0 < len(text) < 40 for text in writes), writes
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=900)
        assert process.returncode == 130


def test_interrupt_ends_with_statistics(headrace_cmd, model_dir):
    process = start(headrace_cmd, "run", model_dir, "-p", PROMPT, *ENDLESS)
    assert os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=900)
    assert process.returncode == 130
    assert b"cancelled" in messages and b"tokens/s" in messages


def test_interrupt_with_json_still_prints_one_object(headrace_cmd, model_dir, tmp_path):
    long_prompt = tmp_path / "long.txt"
    long_prompt.write_text(VAL.read_text(encoding="utf-8")[:6000], encoding="utf-8")
    process = start(headrace_cmd, "run", model_dir, "-f", long_prompt, "--ctx", 2048, "--json",
                    "-n", 0, "--threads", 1, "--isa", "reference")
    until_interruptible(process.pid, threads=2)  # which read experts: the model is nearly open
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, messages = process.communicate(timeout=900)
    assert process.returncode == 130, messages
    if out:  # empty when the model was not open yet
        assert json.loads(out)["finish"] == "cancelled"


def test_interrupt_while_reading_the_prompt(headrace_cmd, model_dir):
    process = start(headrace_cmd, "run", model_dir, "-", stdin=subprocess.PIPE)
    until_interruptible(process.pid, blocked=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=900) == 130
    process.communicate()


def test_interrupt_while_the_prompt_file_blocks(headrace_cmd, model_dir, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = start(headrace_cmd, "run", model_dir, "-f", fifo)
    until_interruptible(process.pid, blocked=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=900)
    assert process.returncode == 130


def test_interrupt_while_nobody_reads_the_text(headrace_cmd, model_dir):
    """Standard output is a full pipe: the write is given up, not the exit code."""
    process = start(headrace_cmd, "run", model_dir, "-p", PROMPT, *ENDLESS)
    assert os.read(process.stdout.fileno(), 1)

    def unread() -> int:
        return int.from_bytes(fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)

    until(lambda: unread() > SMALL_PIPE - 64)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=900) == 130
    process.communicate()


def test_interrupted_score(headrace_cmd, model_dir):
    process = start(headrace_cmd, "score", model_dir, "-f", VAL, "--threads", 1, "--isa", "reference")
    until_interruptible(process.pid, threads=2)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, messages = process.communicate(timeout=900)
    assert process.returncode == 130
    assert out == b""


def test_reader_that_goes_away(headrace_cmd, model_dir):
    process = start(headrace_cmd, "run", model_dir, "-p", PROMPT, *ENDLESS)
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    messages = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=900) == 5
    assert b"standard output" in messages and b"tokens/s" in messages


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("args", [["run", "MODEL", "-p", "x", "-n", "3"], ["inspect", "MODEL"],
                                  ["plan", "MODEL", "--json"], ["version"]], ids=" ".join)
def test_full_disk_is_an_error(headrace_cmd, model_dir, args):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [headrace_cmd.binary, *(str(model_dir) if a == "MODEL" else a for a in args)],
            stdout=full, stderr=subprocess.PIPE, timeout=900)
    assert done.returncode == 5
    assert b"standard output" in done.stderr
