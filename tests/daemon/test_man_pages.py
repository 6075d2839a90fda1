"""The manual pages: one for each command, with all of its options, that a reader of such pages takes without a complaint."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tensord.daemon import cli, ctl, flags
from tests.daemon_process import ROOT

pytest.importorskip("click_man")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man") / "man1"
    command = [sys.executable, "-m", "tensord", "man", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{len(list(folder.iterdir()))} pages in {folder}\n"), done.stderr
    return folder


def commands(command: click.Command, name: str) -> dict[str, click.Command]:
    """Returns a command and all below it, by the names of their pages."""
    found = {name: command}
    if isinstance(command, click.Group):
        for below, each in command.commands.items():
            found |= commands(each, f"{name}-{below}")
    return found


def test_each_command_has_a_page_that_names_its_options(pages: Path) -> None:
    every = commands(cli.main, "tensord") | commands(ctl.main, "tensorctl")
    assert {path.stem for path in pages.iterdir()} == every.keys()
    for name, command in every.items():
        text = (pages / f"{name}.1").read_text().replace(r"\-", "-")
        options = [each for each in command.params if isinstance(each, click.Option)]
        missing = [option for each in options for option in each.opts if option not in text]
        assert not missing, name
        if isinstance(command, click.Group):
            assert [below for below in command.commands if rf"\fB{below}\fP" not in text] == []
    serve = (pages / "tensord-serve.1").read_text().replace(r"\-", "-")
    assert [flag.name for flag in flags.FLAGS if f"--{flag.name}" not in serve] == []


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_man_reads_them(pages: Path) -> None:
    files = sorted(map(str, pages.iterdir()))
    done = subprocess.run(["man", "--warnings", "-l", *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"tensorctl-drain\s+-\s+Take\s+this\s+daemon\s+out\s+of\s+service", done.stdout)
