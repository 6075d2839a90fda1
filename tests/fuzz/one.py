"""Fuzzes targets by libFuzzer: ``python -m tests.fuzz.one BUILD SECONDS RUNS SEED JOBS [TARGET ...]``, which __main__.py starts.

    imports, with counters ─▶ fork ─▶ a target: libFuzzer, until the time is over or something is found
                              fork ─▶ the next one ...                               JOBS at the same time

The imports take longest. They begin no thread, so that the process may fork behind them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

_DONE = re.compile(r"Done (\d+) runs")
_REACHED = re.compile(r"cov: (\d+)")


def main(build: Path, seconds: int, runs: int, seed: int, jobs: int, names: list[str]) -> int:
    """Fuzzes targets, or all if none is named; prints of each how often it ran and how much it reached.

    ``build``: corpora, logs and finds are written there. Returns the exit status; 1: something was found.
    """
    import atheris

    # It names each module.
    with (
        contextlib.redirect_stderr(io.StringIO()),
        atheris.instrument_imports(include=["tensord", "tensord_client"], enable_loader_override=False),
    ):
        from tests.fuzz.targets import TARGETS
    if unknown := [name for name in names if name not in TARGETS]:
        sys.exit(f"fuzz: no target is called {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    # Processes are forked off below. What JAX watches its start with ends on its own, on a busy machine a moment later.
    for thread in threading.enumerate()[1:]:
        thread.join(60)
    assert threading.active_count() == 1
    # It is JAX's, of threads that it has once it was used.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    for folder in ("logs", "finds", *(f"corpus/{name}" for name in TARGETS)):
        (build / folder).mkdir(parents=True, exist_ok=True)
    # Those that take longest first.
    left = sorted(names or TARGETS, key=lambda name: -TARGETS[name].weight)
    running, status = dict[int, str](), 0
    while left or running:
        if left and len(running) < jobs:
            name = left.pop(0)
            if (pid := os.fork()) == 0:
                _fuzz(
                    atheris,
                    build,
                    name,
                    TARGETS[name],
                    [f"-max_total_time={seconds}", f"-runs={runs // TARGETS[name].weight}", f"-seed={seed}"],
                )
            running[pid] = name
            continue
        pid, ended, used = os.wait4(-1, 0)
        status |= _report(build, running.pop(pid), ended, used.ru_utime + used.ru_stime)
    return status


def _fuzz(atheris: Any, build: Path, name: str, target: Any, arguments: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    log = os.open(build / "logs" / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd in (1, 2):
        os.dup2(log, fd)
    shutil.rmtree(seeds := build / "seeds" / name, ignore_errors=True)
    seeds.mkdir(parents=True)
    for number, content in enumerate(target.corpus(name)):
        (seeds / str(number)).write_bytes(content)

    def run(content: bytes) -> None:
        try:
            target.run(content)
        except BaseException:
            # libFuzzer writes it, too, if nothing ends the process before.
            (build / "finds" / f"{name}-exception").write_bytes(content)
            raise

    arguments += ["-max_len=8192", "-timeout=60", "-rss_limit_mb=4096", f"-artifact_prefix={build}/finds/{name}-"]
    atheris.Setup([name, *arguments, str(build / "corpus" / name), str(seeds)], run)
    atheris.Fuzz()
    os._exit(1)


def _report(build: Path, name: str, ended: int, seconds: float) -> int:
    log = (build / "logs" / name).read_text(errors="replace")
    runs, reached = _DONE.search(log), _REACHED.findall(log)
    said = f"{runs[1] if runs else '?'} runs in {seconds:.0f} s of a processor, {reached[-1] if reached else '?'} places reached"
    print(f"{name}: {said}", flush=True)
    if ended:
        print(log[-12_000:], file=sys.stderr)
    return int(ended != 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:6]), sys.argv[6:]))
