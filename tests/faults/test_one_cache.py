"""Workers that share a cache of programs: each program is compiled once, whoever of them dies meanwhile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tensord.workers.programs.cache_directory import CacheDirectory
from tests.daemon_process import ROOT, DaemonProcess, wait_until
from tests.repositories import applying, write_model

#: Takes a moment to be traced, so that all workers miss each program before one has it.
SLOW = applying(
    """
    time.sleep(0.2)
    return {"y": params["factor"] * inputs["x"]}
    """,
    "x FP32[4]",
    "y FP32[4]",
    more="import time\nmax_batch_size = 4",
    params='{"factor": np.float32(3)}',
)


def test_each_program_is_compiled_once(tmp_path: Path, start_daemon: Callable[..., DaemonProcess]) -> None:
    write_model(tmp_path / "models", "slow", SLOW)
    cache = {"cache_directory": str(tmp_path / "cache")}
    daemon = start_daemon(tmp_path / "models", executables=cache, workers={"cpu": 3})
    pattern = r"model 'slow' version 1: (\d+) executables compiled, (\d+) from the cache"
    wait_until(lambda: len(re.findall(pattern, daemon.log)) == 3, "three workers to have it", daemon)
    found = [(int(compiled), int(cached)) for compiled, cached in re.findall(pattern, daemon.log)]
    assert sum(compiled for compiled, _ in found) == 3
    assert {sum(each) for each in found} == {3}
    assert not list((tmp_path / "cache").glob("*.lock"))


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    """1. a process locks a name and is killed; 2. the next one has it at once, and leaves nothing."""
    directory = CacheDirectory(tmp_path / "cache")
    holds = "import sys, time; from pathlib import Path; from tensord.workers.programs.cache_directory import CacheDirectory\n"
    holds += "with CacheDirectory(Path(sys.argv[1])).sole('a'):\n    print(flush=True)\n    time.sleep(600)"
    command = [sys.executable, "-c", holds, str(tmp_path / "cache")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        holder.kill()
    with directory.sole("a"), directory.sole("b"):
        assert sorted(os.listdir(tmp_path / "cache")) == ["a.lock", "b.lock"]
    assert os.listdir(tmp_path / "cache") == []
