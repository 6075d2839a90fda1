"""Tests that commands of README and docs can be typed: the models, programs and flags that they name exist."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tensord.daemon import cli, ctl, flags
from tests.daemon_process import ROOT, DaemonProcess
from tests.examples.test_clients import OF_DIGITS

MODELS = {path.name for path in (ROOT / "examples" / "models").iterdir()}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Where a page or a client names a model; all capitals stand for any.
NAMED = (
    re.compile(r"/v2/(?:repository/)?models/([A-Za-z0-9_.-]+)"),
    re.compile(r"""\.(?:infer|async_infer|async_stream_infer)\(\s*["']([^"']+)["']"""),
    re.compile(r"tensorctl models (?:load|unload) ([A-Za-z0-9_.-]+)"),
    re.compile(r"--load-model=([A-Za-z0-9_.-]+)"),
)
#: Files of models that a page brings along.
BROUGHT = re.compile(r"(\w+)/(?:config\.pbtxt|1/model\.py)$|`(\w+)/(?:config\.pbtxt|1/model\.py)`", re.MULTILINE)
#: Paths of the protocol that stand where a model's name may.
NOT_MODELS = {"stats"}


def blocks(page: Path) -> list[str]:
    """Returns the code blocks of a page; of transcripts only the commands, without prompts."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [
        "".join(re.findall(r"^[#$] (.*\n)", text, re.MULTILINE)) if kind == "console" else text for kind, text in found
    ]


@pytest.mark.parametrize(
    "file", [*PAGES, *sorted((ROOT / "examples" / "clients").glob("*.*"))], ids=lambda path: path.name
)
def test_models_that_are_named_are_served(file: Path) -> None:
    """By ``make serve``, which is what all recipes are for, unless the page says what the model's files are."""
    text = file.read_text()
    found = {name for pattern in NAMED for name in pattern.findall(text)}
    assert {name for name in found if not name.isupper()} - NOT_MODELS <= MODELS | {
        *itertools.chain(*BROUGHT.findall(text))
    }


def test_the_search_finds_models() -> None:
    """It can fail."""
    named = {name for page in PAGES for pattern in NAMED for name in pattern.findall(page.read_text())}
    assert "digits" in named
    assert NAMED[1].findall('client.infer(\n    "scale", [given])') == ["scale"]


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Returns each command line of a program in the pages' blocks and inline code: page and arguments."""
    found = []
    for page in PAGES:
        inline = re.findall(r"`([^`\n]+)`", page.read_text())
        lines = [line.split("#")[0] for block in blocks(page) for line in block.splitlines()]
        for line in [*lines, *inline]:
            if match := re.match(rf"(?:\S*/bin/)?{program}( .*|$)", line.strip()):
                found.append((page.name, shlex.split(match[1].split(" && ")[0])))
    return found


def test_commands_of_tensord() -> None:
    """Commands and flags that it has."""
    found = commands("tensord")
    assert len(found) > 5
    for page, arguments in found:
        given = [argument for argument in arguments if not argument.startswith("-")]
        assert not given or given[0] in cli.main.commands, (page, arguments)
        known = {f"--{flag.name}" for flag in flags.FLAGS} | {"--help", "--version"}
        known |= {option for name in given[:1] for each in cli.main.commands[name].params for option in each.opts}
        for argument in arguments:
            assert not argument.startswith("-") or argument.partition("=")[0] in known, (page, arguments)


def test_commands_of_tensorctl() -> None:
    found = commands("tensorctl")
    assert len(found) > 5
    for page, arguments in found:
        group: click.Command = ctl.main
        for argument in arguments:
            if argument.startswith(("-", "[")) or not isinstance(group, click.Group):
                break
            assert argument in group.commands, (page, arguments)
            group = group.commands[argument]
        assert CliRunner().invoke(group, ["--help"]).exit_code == 0


def test_what_the_readme_tries() -> None:
    """Each client is one that the tests run (``test_clients``), each target one that the Makefile has."""
    typed = [line.split("#")[0].split() for block in blocks(ROOT / "README.md")[2:4] for line in block.splitlines()]
    clients = {Path(words[-1]).name for words in typed if words and "examples/clients" in words[-1]}
    assert clients == set(OF_DIGITS)
    makefile = (ROOT / "Makefile").read_text()
    targets = [words[1] for words in typed if words and words[0] == "make"]
    assert targets == ["serve", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    """README's, typed as it stands."""
    (code,) = [block for block in blocks(ROOT / "README.md") if "def create" in block]
    (name,) = re.findall(r"The smallest, `(\S+)`, is:", (ROOT / "README.md").read_text())
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(code)
    with DaemonProcess(tmp_path, [tmp_path / "models"]) as daemon:
        x = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [float(i) for i in range(8)]}
        status, answer = daemon.infer("double", [x])
        assert (status, answer["outputs"][0]["data"]) == (200, [2.0 * i for i in range(8)])


def test_make_serve_is_what_it_says(tmp_path: Path) -> None:
    """The configuration that ``make serve`` names is a good one, and its models are the examples', which clients ask."""
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "tensord serve" in line]
    config = shlex.split(line.replace("$(ARGS)", ""))[-1]
    command = [sys.executable, "-m", "tensord", "check", "--read-only", config]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert {found.partition(":")[0] for found in done.stdout.splitlines()} - {"configuration"} <= MODELS
    assert "digits: version 1" in done.stdout
