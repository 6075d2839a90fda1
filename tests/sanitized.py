"""Runs tests with all parts in C built to find their faults: ``python -m tests.sanitized [--thread|--debug] [...]``.

    tree ─▶ copy in build/sanitized ─▶ parts in C, compiled with checks ─▶ pytest there ─▶ a report: exit status 1

By default with AddressSanitizer and UndefinedBehaviorSanitizer, which find reads and writes outside of an object, use after it
was freed, and what C leaves undefined. ``--thread``: with ThreadSanitizer, which finds memory that two threads use without an
order. ``--debug``: for the debug build of this interpreter (Debian: python3.11-dbg), which finds references that are given back
twice and calls without the interpreter's lock. Without names of tests it runs those that reach C, or have threads in C.

The copy has the files that git knows and those that it does not ignore, so that the parts beside the sources stay as they are.
A report ends the process that it is about; a daemon may start another one in its place, so reports are files, and each of them
fails the run. Memory that is never freed is not looked for: an interpreter leaves much at its end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.daemon_process import ROOT

#: What reaches C: by generated and changed records, by real clients, by attacks and kills.
REACHES_C = (
    "tests/client/test_lane.py",
    "tests/client/test_lane_ends.py",
    "tests/client/test_lane_header.py",
    "tests/client/test_lane_queue.py",
    "tests/client/test_request_ends.py",
    "tests/client/test_wire.py",
    "tests/client/test_worker_lane.py",
    "tests/daemon/grpc/test_hpack_decoder.py",
    "tests/daemon/grpc/test_repeated_messages.py",
    "tests/daemon/grpc/test_walk.py",
    "tests/faults/test_client_lanes.py",
    "tests/fuzz",
    "tests/shm/test_guard.py",
    "tests/shm/test_lane.py",
    "tests/shm/test_regions.py",
    "tests/shm/test_strings.py",
    "tests/workers/dispatch/test_fast_path.py",
    "tests/workers/dispatch/test_single_run.py",
    "tests/workers/native",
)
#: What has several threads in C at the same time.
HAS_THREADS = ("tests/client/test_lane.py", "tests/client/test_lane_queue.py", "tests/client/test_request_ends.py")
#: A fault of memory stays the guard's and the interpreter's own; an allocation that is too large fails as it does elsewhere.
OPTIONS = "handle_segv=0:handle_sigbus=0:handle_abort=0:detect_leaks=0:allocator_may_return_null=1"
_BUILD = ROOT / "build"


def copied(copy: Path) -> None:
    """Makes the folder ``copy`` the tree as it is now, without what git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    shutil.rmtree(copy, ignore_errors=True)
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def built(copy: Path, settings: Mapping[str, str], python: str = sys.executable) -> None:
    """Compiles all parts in C in the folder ``copy``.

    Args:
      settings: variables of the environment for the compiler, such as CFLAGS.
      python: the interpreter whose headers they include.

    Raises: SystemExit: one does not compile.
    """
    for folder in (copy, copy / "client"):
        command = [python, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=folder, env={**os.environ, **settings}, check=True, stderr=subprocess.DEVNULL)
    parts = [path for path in copy.rglob("*.c") if "PyInit_" in path.read_text()]
    if missing := [str(path) for path in parts if not path.with_name(f"{path.stem}.abi3.so").exists()]:
        raise SystemExit(f"these parts did not compile: {', '.join(missing)}")


def debug_interpreter() -> str:
    """Makes an environment in build/debug that has this one's libraries. Returns its interpreter, a debug build.

    Raises: SystemExit: none is installed.
    """
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if (found := shutil.which(f"{name}d")) is None:
        raise SystemExit(f"sanitized: {name}d is not installed (Debian: apt-get install {name}-dbg)")
    folder = _BUILD / "debug"
    subprocess.run([found, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    line = f"import site; site.addsitedir({libraries!r})\n"
    (folder / "lib" / name / "site-packages" / "libraries.pth").write_text(line)
    return str(folder / "bin" / "python")


def main(arguments: list[str]) -> int:
    """Builds, runs pytest, prints reports. Returns the exit status."""
    modes = {"--thread", "--debug"} & set(arguments)
    chosen = [each for each in arguments if each not in modes]
    if not any(each.startswith("tests") for each in chosen):
        chosen += HAS_THREADS if "--thread" in modes else REACHES_C
    copy, reports = _BUILD / "sanitized", _BUILD / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    copied(copy)
    python, environment = sys.executable, {"PYTHONPATH": f"{copy}:{copy / 'client'}"}
    if "--debug" in modes:
        python = debug_interpreter()
        built(copy, {"CFLAGS": "-UNDEBUG"}, python)
    else:
        sanitizer, libraries = ("thread", ["tsan"]) if modes else ("address,undefined", ["asan", "ubsan"])
        flags = f"-fsanitize={sanitizer} -fno-sanitize-recover=all -fno-omit-frame-pointer"
        built(copy, {"CFLAGS": f"{flags} -g -O1", "LDFLAGS": flags})
        ask = [["gcc", f"-print-file-name=lib{name}.so"] for name in libraries]
        found = [subprocess.run(each, check=True, capture_output=True, text=True).stdout.strip() for each in ask]
        options = f"{OPTIONS}:log_path={reports}/report"
        environment |= {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": options}
        # The order that XLA's threads keep is not seen, as XLA was not built for it; so only what is called from here counts.
        environment["TSAN_OPTIONS"] = f"{options}:ignore_noninstrumented_modules=1"
        environment["UBSAN_OPTIONS"] = f"print_stacktrace=1:log_path={reports}/report"
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-n", "5", "--dist", "loadfile", *chosen]
    status = subprocess.run(command, cwd=copy, env={**os.environ, **environment}).returncode
    for report in sorted(reports.iterdir()):
        print(f"sanitized: {report}", report.read_text(errors="replace"), sep="\n", file=sys.stderr)
        status = status or 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
