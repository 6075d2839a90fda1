"""Fuzzes targets: ``python -m tests.fuzz [--seconds S] [--runs N] [--jobs N] [TARGET ...]``; all without names (targets.py).

The parts in C are compiled by clang with the sanitizers and with counters of what was reached, in a copy in build/fuzz; of the
product's Python code atheris counts the same. What reaches something new is kept in build/corpus, where the next run goes on.
Bytes that show a fault are written to build/finds; once it is mended they belong into tests/fuzz/corpus/TARGET, which ordinary
runs of the tests read. Exit status 1: something was found, or clang or the engine is not there (``--tools`` only looks for them).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import run_folder
from tests.client.test_lane_header import built_library
from tests.daemon_process import ROOT
from tests.sanitized import OPTIONS, built, copied

_BUILD = ROOT / "build"
_FLAGS = "-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
#: The engine, which brings libFuzzer and the sanitizers' runtime of its own.
_ENGINE = "atheris>=3,<4"


def tools() -> tuple[str, Path]:
    """Finds clang, and installs the engine. Returns the compiler and the engine's folder. Raises SystemExit: one is missing."""
    names = ("clang", *(f"clang-{number}" for number in range(21, 13, -1)))
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise SystemExit("fuzz: clang is not installed (Debian 12: apt-get install clang-14 libclang-rt-14-dev)")
    engine = _BUILD / "engine"
    if not engine.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(engine), _ENGINE]
        if subprocess.run(command).returncode:
            raise SystemExit(f"fuzz: {_ENGINE} cannot be installed")
    return compiler, engine


def prepare() -> dict[str, str]:
    """Builds the copy. Returns the environment for fuzzing. Raises SystemExit: a tool or a part in C is missing."""
    compiler, engine = tools()
    copied(copy := _BUILD / "fuzz")
    built(copy, {"CC": compiler, "LDSHARED": f"{compiler} -shared", "CFLAGS": f"{_FLAGS} -g -O1"})
    built_library(copy / "tests/client/records.so", compiler, *_FLAGS.split(), "-g", "-O1")
    return {
        **os.environ,
        "PYTHONPATH": f"{copy}:{copy / 'client'}:{engine}",
        "LD_PRELOAD": str(engine / "asan_with_fuzzer.so"),
        "ASAN_OPTIONS": OPTIONS,
    }


def main() -> int:
    """Fuzzes what the command line names. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=30, help="for each target (default: 30)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of what is chosen by chance (default: another one each time)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="targets at the same time (default: one a core)"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=-1,
        help="of each target at most, of slow ones fewer (default: as many as there is time for)",
    )
    parser.add_argument("--tools", action="store_true", help="only looks whether the tools are there")
    parser.add_argument("target", nargs="*", help="names of targets; all by default")
    options = parser.parse_args()
    if options.tools:
        tools()
        return 0
    remove = run_folder.make()
    try:
        environment = prepare()
        numbers = map(str, (options.seconds, options.runs, options.seed, options.jobs))
        command = [sys.executable, "-m", "tests.fuzz.one", str(_BUILD), *numbers, *options.target]
        return subprocess.run(command, cwd=_BUILD / "fuzz", env=environment).returncode
    finally:
        remove()


if __name__ == "__main__":
    sys.exit(main())
