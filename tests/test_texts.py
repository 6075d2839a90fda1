"""Tests that texts used in several places are worded once, such as limits that clients exceed, and how wide pages are."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensord.shm import trace_stamps
from tests.test_imports import ROOT, modules

_STAMP = re.compile(r"(HTTP|GRPC|REQUEST|QUEUE|COMPUTE|RESPONSE)_([A-Z]+_)?(START|END)")


def texts(tree: ast.AST) -> Iterator[str]:
    """Yields the strings of a module as they are written, each inserted value as {}."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def test_texts_are_found() -> None:
    assert sorted(texts(ast.parse('f(f"{n} given, at most {m} are", "x")'))) == ["x", "{} given, at most {} are"]


def test_each_limit_is_worded_once() -> None:
    found = Counter(text for path in modules() for text in texts(ast.parse(path.read_text())) if "at most {}" in text)
    assert len(found) > 40
    assert [text for text, count in found.items() if count > 1] == []
    assert [text for text in found if text.startswith("the request body")] == [
        "the request body {}, at most {} are allowed"
    ]


def test_the_status_of_a_body_that_is_too_large_stands_once() -> None:
    places = [
        str(path.relative_to(ROOT))
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value == 413
    ]
    # The other one is the table of what statuses are called.
    assert sorted(places) == ["daemon/front/status.py", "daemon/http/response_codec.py"]


def test_moments_of_a_trace_are_named_in_one_module() -> None:
    found = {
        (text, str(path.relative_to(ROOT)))
        for path in modules()
        for text in texts(ast.parse(path.read_text()))
        if _STAMP.fullmatch(text)
    }
    names = {value for name, value in vars(trace_stamps).items() if name.isupper()}
    assert found == {(name, "shm/trace_stamps.py") for name in names}


def prose(page: Path) -> Iterator[str]:
    """Yields a page's lines but blocks of code, tables, headings and routes of files, without targets of links and short code."""
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not re.match(r"\s*(\||#|\d+\. `)", line):
            yield re.sub(r"\]\([^)]*\)|`[^`]*`", "", line)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda page: page.name)
def test_lines_of_prose_have_at_most_120_characters(page: Path) -> None:
    assert [line for line in prose(page) if len(line) > 120] == []
