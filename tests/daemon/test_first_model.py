"""``tensord init``, and that what it writes is served as it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.daemon_process import PATIENCE, ROOT, DaemonProcess


def init(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tensord", "init", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)


def test_what_it_writes_is_served(tmp_path: Path) -> None:
    done = init(tmp_path / "models" / "mine")
    assert done.returncode == 0, done.stderr
    assert f"--model-repository={tmp_path / 'models'}" in done.stdout
    asked = re.search(r"curl localhost:8000(\S+) -d \\\s+'(.*)'", done.stdout)
    assert asked is not None
    with DaemonProcess(tmp_path, [tmp_path / "models"]) as daemon:
        status, answer = daemon.request("POST", asked[1], asked[2].encode())
        assert status == 200
        assert len(json.loads(answer)["outputs"][0]["data"]) == 2


def test_it_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.pbtxt").write_text("")
    done = init(tmp_path / "mine")
    assert (done.returncode, "is not empty" in done.stderr) == (1, True)
    assert not (tmp_path / "mine" / "1").exists()


def test_a_name_that_no_model_has(tmp_path: Path) -> None:
    done = init(tmp_path / "-mine")
    assert (done.returncode, "no model can be called '-mine'" in done.stderr) == (1, True)
