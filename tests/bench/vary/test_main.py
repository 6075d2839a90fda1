"""The table of the varied rows, and what the command line refuses."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from bench.vary.__main__ import head, line, orders
from bench.vary.client import Figures
from bench.vary.servers import program
from tests.daemon_process import ROOT


def _figures(answers: int, p50_us: float, lost: int = 0) -> Figures:
    return Figures(
        answers, answers, lost, 2.0, p50_us, 2 * p50_us, 3 * p50_us, 9.5, None if p50_us % 20 == 0 else 2 * p50_us
    )


def test_medians_and_ratios_of_the_rounds() -> None:
    rounds = [
        [_figures(200, 10), _figures(100, 20)],
        [_figures(400, 30), _figures(100, 40, lost=7)],
        [_figures(900, 20), _figures(300, 60)],
    ]
    assert head(["ours", "peer"]).splitlines()[0] == (
        "| row | ours/s | p50 us | cpu us | MB | peer/s | x | p50 us | cpu us | MB | client us |"
    )
    assert (
        line("vary-x", rounds, [250.4, None])
        == "| vary-x | 200 | 20 | 40 | 250 | 50 (7 lost) | 3.00 (2.00 to 4.00) | 40 |  |  | 9.5 |"
    )


def test_no_server_is_always_the_first() -> None:
    assert [list(order) for order in itertools.islice(orders(3), 3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


def test_the_daemon_of_a_checkout(tmp_path: Path) -> None:
    done = subprocess.run([*program(ROOT), "serve", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--model-repository" in done.stdout
    # One from before there was a package tensord.
    assert program(tmp_path) == [sys.executable, "-m", "daemon"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "vary-http-id-c5"], "no row 'vary-http-id-c5'"),
        (["--pool", "1999"], "--pool 1999: 2000 or more are needed"),
        (["--rounds", "0"], "must be more than 0"),
        (["--other", "bench"], "--other bench: no checkout of ours"),
    ],
)
def test_what_the_command_line_refuses(words: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "bench.vary", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
