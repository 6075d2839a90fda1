from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench.figures import ASKED, markdown
from bench.server import ROOT


def test_a_line_for_each_row_with_what_was_asked_for(tmp_path: Path) -> None:
    rounds = [{"infer_per_s": rate, "p50_us": us, "p99_us": us} for rate, us in ((100, 10), (300, 30), (200, 20))]
    other = [
        {"infer_per_s": rate / 2, "p50_us": us * 2, "p99_us": us} for rate, us in ((100, 10), (300, 30), (200, 20))
    ]
    figures = tmp_path / "figures.json"
    figures.write_text(
        json.dumps(
            {
                "small-http-c1": {"rate_ratio": 2.004, "p50_ratio": 0.61, "ours": rounds, "peer": other},
                "unheard-of": {"rate_ratio": 0.5, "p50_ratio": 2.0, "ours": rounds, "peer": other},
                "mlp-http-c32": {"error": "no output"},
            }
        )
    )
    _, _, *lines = markdown(figures).splitlines()
    assert lines == [
        "| small-http-c1 | 200 | 100 | **2.00** | >= 1.7 | 20 | 40 | 0.61 | <= 0.6 |",
        "| unheard-of | 200 | 100 | 0.50 |  | 20 | 40 | 2.00 |  |",
    ]


def test_what_is_asked_for_is_measured() -> None:
    assert set(ASKED) <= set(bench.ROWS.split(","))


_DRAWS = "import pathlib, sys; from bench.figures import ratios; ratios(*map(pathlib.Path, sys.argv[1:]))"


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_a_picture_of_the_measured_rows(tmp_path: Path, suffix: str, start: bytes) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text(
        json.dumps(
            {"small-http-c1": {"rate_ratio": 1.7, "p50_ratio": 0.5}, "small-grpc-c1": {"error": "no server answered"}}
        )
    )
    picture = tmp_path / f"ratios{suffix}"
    # The library keeps its fonts open as long as its process lives.
    subprocess.run([sys.executable, "-c", _DRAWS, figures, picture], cwd=ROOT, check=True)
    assert picture.read_bytes().startswith(start)
