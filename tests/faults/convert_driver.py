"""Conversions that meet one fault each, at the first, second, ... counted call until none is left.

Arguments: SOURCE WORK OPTIONS CAMPAIGN...; OPTIONS of headrace-convert, separated by commas. Prints for each campaign one JSON object: name, points, problems.
Every point: the conversion ends as the campaign allows, nothing half-written looks whole, no
descriptor stays open, the same command again finishes, and the result is that of a clean run.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from convert_helpers import run, tree
from headrace_tools.convert import cli
from support.injection import KILLED, Shim, descriptors, in_child

WRITES = "write,pwrite,truncate,fsync,rename,mkdir,unlink,create,close"
READS = "read,pread,open,stat"


@dataclass(frozen=True)
class Campaign:
    """calls, action, times and period as in plan.h; `where`: whose files. `code`: errno it gives."""

    calls: str
    action: str
    times: int = 1
    period: int = 0
    where: str = "target"
    code: int = 0
    succeeds: bool = False  # the conversion must not even notice


def _errno(code: int, calls: str = WRITES, times: int = 1, where: str = "target") -> Campaign:
    return Campaign(calls, f"errno:{code}", times, where=where, code=code)


CAMPAIGNS = {
    "kill": Campaign(WRITES, "kill"),
    "torn write, then kill": Campaign("write,pwrite", "torn"),
    "power cut": Campaign(WRITES, "power"),
    "disk full": Campaign(WRITES.replace(",unlink", "").replace(",close", ""), "full", 0,
                          code=errno.ENOSPC),
    "EIO once": _errno(errno.EIO),
    "EIO for good": _errno(errno.EIO, times=0),
    "read-only from then on": _errno(errno.EROFS, "truncate,rename,mkdir,unlink,create", 0),
    "short writes": Campaign("write,pwrite", "short", 0, succeeds=True),
    "reading back fails": _errno(errno.EIO, READS),
    "source: EIO once": _errno(errno.EIO, READS, where="source"),
    "source: gone": _errno(errno.ENODEV, READS, 0, where="source"),
    "source: short reads": Campaign("read,pread", "short", 0, where="source", succeeds=True),
    "source: EINTR storm": Campaign("read,pread,open", f"errno:{errno.EINTR}", 9, 10, "source",
                                    succeeds=True),
    "target: EINTR storm": Campaign("read,pread,write,pwrite,truncate,fsync,create,open",
                                    f"errno:{errno.EINTR}", 9, 10, succeeds=True),
}


def looks_whole(path: Path) -> bool:
    return (path / "manifest.sha256").exists() and not (path / "conversion.log").exists()


class Driver:
    def __init__(self, source: Path, work: Path, options: list[str]) -> None:
        self.source, self.work, self.options = source, work, [*options, "--quiet"]
        self.shim = Shim()
        assert self.convert(work / "clean")[0] == 0
        self.clean = tree(work / "clean")

    def convert(self, target: Path) -> tuple[int, str]:
        """Exit code and what was said."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = run(self.source, target, *self.options)
        return code, said.getvalue()

    def struck(self, campaign: Campaign, nth: int, target: Path) -> dict[str, object]:
        """In the child: one conversion under the plan."""
        before = descriptors()
        path = target if campaign.where == "target" else self.source
        self.shim.arm(f"calls={campaign.calls} path={path} nth={nth} times={campaign.times} "
                      f"period={campaign.period} action={campaign.action}")
        code, said = self.convert(target)
        fired = self.shim.disarm()
        return {"code": code, "said": said, "fired": fired,
                "left": [d for d in descriptors() if d not in before]}

    def judge(self, campaign: Campaign, target: Path, status: int, result: object) -> list[str]:
        """What is wrong after one struck conversion."""
        bad = []
        if looks_whole(target) and tree(target) != self.clean:
            bad.append("half-written, but looks whole")
        if campaign.action in ("kill", "torn", "power"):
            return bad if status == KILLED else [*bad, f"ended with {status} instead of SIGKILL"]
        if status != 0 or not isinstance(result, dict):
            return [*bad, f"the process ended with {status}"]
        code, said = result["code"], str(result["said"])
        if result["left"]:
            bad.append(f"left open: {result['left']}")
        if "Traceback" in said:
            bad.append(said)
        if code == 0:
            return bad if tree(target) == self.clean else [*bad, "succeeded with other bytes"]
        if campaign.succeeds:
            bad.append(f"failed with {code}: {said}")
        place = target if campaign.where == "target" else self.source
        if code != 5:
            bad.append(f"exit code {code}: {said}")
        if os.strerror(campaign.code) not in said or str(place) not in said:
            bad.append(f"does not say where and why: {said}")
        if campaign.times == 1 and list(target.glob("*.partial")):
            bad.append(f"left a partial file: {[p.name for p in target.glob('*.partial')]}")
        return bad

    def rerun(self, target: Path) -> list[str]:
        code, said = self.convert(target)
        if code != 0:
            return [f"the rerun ends with {code}: {said}"]
        return [] if tree(target) == self.clean else ["the rerun gives other bytes"]

    def point(self, campaign: Campaign, nth: int) -> tuple[bool, list[str]]:
        """Whether the fault struck, and what is wrong."""
        target = self.work / "o"
        shutil.rmtree(target, ignore_errors=True)
        if campaign.action in ("kill", "torn", "power"):
            status, result = in_child(lambda: self.struck(campaign, nth, target))
            if isinstance(result, dict) and result["fired"] == 0:
                return False, []
            return True, self.judge(campaign, target, status, result) + self.rerun(target)
        result = self.struck(campaign, nth, target)
        if result["fired"] == 0:
            return False, []
        return True, self.judge(campaign, target, 0, result) + self.rerun(target)

    def run(self, name: str) -> dict[str, object]:
        campaign, nth, problems = CAMPAIGNS[name], 0, []
        while True:
            nth += 1
            struck, bad = self.point(campaign, nth)
            if not struck:
                break
            problems += [f"{nth}: {text}" for text in bad]
            if campaign.succeeds and nth > 2:  # every call is struck already
                break
        return {"name": name, "points": nth - 1, "problems": problems}


def main() -> None:
    cli._engine_verify = lambda: None
    if library := os.environ.get("HEADRACE_TEST_LIBRARY"):
        import headrace

        headrace.use_library(library)
    driver = Driver(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
    for name in sys.argv[4:] or CAMPAIGNS:
        print(json.dumps(driver.run(name)), flush=True)


main()
