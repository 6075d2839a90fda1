"""A client of a real daemon whose model moves to another worker, gets a version more, and goes, while the client has lanes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensord_client

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess


def test_a_model_that_moves_and_goes(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. It gets a worker to itself, over whose lane it answers from then on. 2. It gets a version more. 3. It is unloaded.
    Result: no call fails before it is unloaded, and another model that stayed answers all the time.
    """
    models = tmp_path / "models"
    for name in ("scale", "other"):
        repositories.scale_model(models, name)
    sockets = {"socket": str(tmp_path / "clients.sock")}
    daemon = start_daemon(models, clients=sockets, repository={"control_mode": "explicit", "load": ["scale", "other"]})
    daemon.wait_ready()

    def ask(what: str) -> None:
        assert daemon.request("POST", f"/v2/repository/models/scale/{what}", b"{}")[0] == 200

    x = {"x": np.ones((2, 4), np.float32)}
    with tensord_client.connect(sockets["socket"], patience=PATIENCE) as client:
        scale, other = client.model("scale", timeout=PATIENCE), client.model("other", timeout=PATIENCE)

        def answered_by() -> int:
            assert scale(x)["y"].tolist() == other(x)["y"].tolist() == [[4] * 4] * 2
            return scale(x).version

        assert answered_by() == 1
        (models / "scale" / "config.pbtxt").write_text('parameters { key: "isolated" value { string_value: "true" } }')
        ask("load")
        assert (len(daemon.workers), answered_by()) == (2, 1)
        shutil.copytree(models / "scale" / "1", models / "scale" / "2")
        ask("load")
        assert answered_by() == 2
        ask("unload")
        with pytest.raises(tensord_client.NotFound):
            scale(x)
        assert other(x)["y"].shape == (2, 4)
