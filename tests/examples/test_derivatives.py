"""The examples of derivatives of served models."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon_process import DaemonProcess
from tests.examples.models import ROOT

pytestmark = pytest.mark.xdist_group("examples")
FOLDER = ROOT / "examples" / "derivatives"


def test_the_friction_of_a_pendulum_is_found(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, [FOLDER / "models"]) as daemon:
        command = [sys.executable, str(FOLDER / "pendulum.py"), "--url", daemon.url]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout
    found = re.search(r"a friction of (\d\.\d+) was found", ended.stdout)
    assert found is not None, ended.stdout
    assert abs(float(found[1]) - 0.35) < 0.01
