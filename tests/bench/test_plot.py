from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.server import ROOT


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
    subprocess.run([sys.executable, "-m", "bench.plot", figures, picture], cwd=ROOT, check=True)
    assert picture.read_bytes().startswith(start)
