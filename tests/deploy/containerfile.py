"""Reads deploy/container/Containerfile, and carries its instructions out without a builder, in an overlay of this host's files.

unshare: mounts, processes, network ─▶ overlay of / ─▶ COPY: cp, RUN: chroot ─▶ the entry point as USER, in the environment of ENV
"""

from __future__ import annotations

import json
import re
import shlex
from typing import NamedTuple

from tests.daemon_process import ROOT

CONTAINERFILE = ROOT / "deploy/container/Containerfile"


class Instruction(NamedTuple):
    """One instruction, with its continuation lines."""

    word: str
    rest: str


def instructions() -> list[Instruction]:
    """Returns the instructions in their order, without comments."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", "", text).splitlines()
    return [Instruction(*line.split(None, 1)) for line in lines if line.strip()]


def only(word: str) -> str:
    """Returns the arguments of the only instruction of a kind."""
    (found,) = (each.rest for each in instructions() if each.word == word)
    return found


def words(word: str) -> list[str]:
    """Returns the arguments of an instruction that has them as a JSON list (ENTRYPOINT, CMD, VOLUME)."""
    return list(json.loads(only(word)))


def environment() -> dict[str, str]:
    """Returns the variables that ENV sets."""
    return dict(pair.split("=", 1) for pair in shlex.split(only("ENV")))  # type: ignore[misc]


def health() -> list[str]:
    """Returns the command of HEALTHCHECK."""
    return list(json.loads(only("HEALTHCHECK").partition("CMD ")[2]))


def packages() -> list[str]:
    """Returns the names of the packages that apt-get installs."""
    (step,) = (each.rest for each in instructions() if each.word == "RUN" and "apt-get" in each.rest)
    installed = re.search(r"apt-get install ([^&]*)", step)
    assert installed is not None
    return [name for name in installed[1].split() if not name.startswith("-")]


def steps(sources: dict[str, str]) -> str:
    """Returns a shell script that carries out COPY and RUN in the folder ``$root``, without the step that calls apt-get.

    Args:
      sources: files that COPY names -> where they lie on this host, such as for ``dist/tensord-*.whl``.
    """
    lines = ["set -e"]
    for word, rest in instructions():
        if word == "COPY":
            *files, target = rest.split()
            lines.append(f'install -d "$root$(dirname {target}x)"')
            lines += [f'cp -r {shlex.quote(sources.get(file, str(ROOT / file)))} "$root{target}"' for file in files]
        elif word == "RUN" and "apt-get" not in rest:
            lines.append(f'chroot "$root" env EXTRA= PATH="$steps_path" sh -ec {shlex.quote(rest)}')
    return "\n".join(lines) + "\n"
