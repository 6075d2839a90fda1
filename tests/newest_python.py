"""Prints the newest interpreter on this machine that tensord runs on, if it is newer than the one that runs this; else nothing.

It looks on the path and where version managers keep theirs. Each candidate is run: a version manager puts commands on the path
that only say which version is not chosen, and some interpreters lack what an environment needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_NEWEST = (3, 14)
_NAME = re.compile(r"python3\.\d+")
_ASK = "import sys, venv, ensurepip, ctypes, ssl; print(*sys.version_info[:2], sys.executable, sep='\\t')"


def folders() -> list[Path]:
    """Returns folders that may have interpreters: the path, pyenv's versions, and those of similar programs."""
    path = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"]
    roots += [Path.home() / ".local/share/uv/python", Path.home() / ".asdf/installs/python"]
    return path + [folder for root in roots for folder in sorted(root.glob("*/bin"))]


def newest(looked_in: Iterable[Path], known: tuple[int, int] = sys.version_info[:2]) -> str:
    """Returns the path of the newest interpreter newer than ``known``, as it calls itself; "": there is none."""
    best, found = known, ""
    for folder in looked_in:
        for candidate in sorted(folder.glob("python3.*")) if folder.is_dir() else ():
            if _NAME.fullmatch(candidate.name) is None or not os.access(candidate, os.X_OK):
                continue
            version = int(candidate.name.partition(".")[2])
            if not best < (3, version) <= _NEWEST:
                continue
            done = subprocess.run([candidate, "-c", _ASK], capture_output=True, text=True)
            if done.returncode == 0:
                *said, executable = done.stdout.strip().split("\t")
                if tuple(map(int, said)) == (3, version):
                    best, found = (3, version), executable
    return found


if __name__ == "__main__":
    print(newest(folders()))
