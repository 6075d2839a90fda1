"""Tests that nothing is used that a patch release of the oldest Python brought: that version's first release is enough."""

from __future__ import annotations

import ast
import configparser
import subprocess
from collections.abc import Iterator

import pytest

from tests.daemon_process import ROOT

#: Names, and keyword arguments, that 3.11.1 to 3.11.13 added to the standard library, by "What's new" and versionadded.
LATER = {
    *("data_filter", "tar_filter", "fully_trusted_filter", "FilterError", "LinkFallbackError"),
    *("SetReparseDeferralEnabled", "GetReparseDeferralEnabled", "flush_reparse_deferral"),
    *("ALLOW_MISSING", "filter="),
}
#: Functions whose keyword ``filter`` is as new; others have had one for long.
FILTERED = {"extract", "extractall", "unpack_archive"}


def used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in FILTERED:
                yield from (f"{keyword.arg}=" for keyword in node.keywords)


def test_the_first_release_of_the_oldest_version_is_enough() -> None:
    read = configparser.ConfigParser()
    read.read(ROOT / "setup.cfg")
    assert read["options"]["python_requires"] == ">=3.11", "the table above is of another version"
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("this is no checkout")
    found = {
        (name, word)
        for name in tracked.stdout.splitlines()
        for word in LATER & {*used(ast.parse((ROOT / name).read_text()))}
    }
    assert found == set()


@pytest.mark.parametrize(
    "code", ["tarfile.data_filter", "t.extract(m, filter='data')", "from tarfile import tar_filter"]
)
def test_what_it_finds(code: str) -> None:
    assert LATER & {*used(ast.parse(code))}
