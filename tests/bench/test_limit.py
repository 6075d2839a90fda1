"""The arithmetic of bench.limit, and what it says where there is no bound to be had."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest

from bench.limit import line, native

COLUMNS = ["bare", "ours", "peer"]


def test_ratios_are_of_each_round() -> None:
    """2, 4 and 3, so 3; the ratio of the medians is 4."""
    rounds = [
        {"bare": 80.0, "ours": 20.0, "peer": 40.0},
        {"bare": 400.0, "ours": 50.0, "peer": 100.0},
        {"bare": 450.0, "ours": 75.0, "peer": 150.0},
    ]
    assert line("row", COLUMNS, rounds) == "| row | 400, 3.00 | 50, 0.50 | 100 |"


def test_what_was_not_stable_counts_in_no_median() -> None:
    rounds = [
        {"bare": None, "ours": 100.0, "peer": 100.0},
        {"bare": None, "ours": 900.0, "peer": None},
        {"bare": None, "ours": 300.0, "peer": 200.0},
        {"bare": None, "ours": None, "peer": 400.0},
    ]
    assert line("row", COLUMNS, rounds) == "| row | never stable | 300, 1.25 | 200 |"


def test_without_the_peers_figure_there_is_no_ratio() -> None:
    rounds = [{"bare": 7.0, "ours": 5.0, "peer": None}]
    assert line("row", COLUMNS, rounds) == "| row | 7 | 5 | never stable |"


def test_a_server_without_the_model_has_an_empty_cell() -> None:
    rounds = [{"ours": 100.0, "peer": 50.0}] * 2
    assert line("row", COLUMNS, rounds) == "| row |  | 100, 2.00 | 50 |"


def test_without_a_compiler_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with contextlib.ExitStack() as stack:
        assert native(stack, itertools.count(1), tmp_path) == {}
    assert capsys.readouterr().err.startswith("no C compiler (cc): the chain in C is left out")
