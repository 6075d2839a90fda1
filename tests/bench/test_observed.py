"""The measurement of what it costs to be seen: a scrape of real models, and the line of a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import observed
from bench.fronts import Run


def test_a_scrape_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], leaves_nothing: None) -> None:
    observed._report_scrapes(3, tmp_path)
    scrape, held = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"3 models, \d{5,} bytes: [\d.]+ ms a scrape, [\d.]+ ms of the supervisor", scrape)
    sizes = re.findall(r"([\d.]+) MB", held)
    assert len(sizes) == 2
    assert all(float(size) > 1 for size in sizes)


def test_pairs_are_compared() -> None:
    """A machine that grows slower changes both rates, and no ratio."""
    off = [Run(rate, 100.0, 20.0, 10.0, 1.0, 0, 10.0) for rate in (1000.0, 500.0, 100.0)]
    on = [Run(rate, 100.0, 22.0, 11.0, 1.0, 0, 11.0) for rate in (990.0, 495.0, 99.0)]
    cells = "500 | 0.990 | 1.000 | 1.100 | 1.000 | 40.0 -> 44.0 | 20.0 -> 22.0 | 10.0 -> 11.0 | 10.0 -> 11.0"
    assert observed._line("small", off, on, off) == f"| small | {cells} |"
