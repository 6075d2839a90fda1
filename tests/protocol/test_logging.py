"""Log settings changed by a client, seen in what the daemon's processes write. A real daemon, the published client."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonProcess, wait_until

CHATTY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_INT32", "dims": [1]})
        return config

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            for log in (pb_utils.Logger.log_info, pb_utils.Logger.log_verbose, pb_utils.Logger.log_error):
                log(f"{log.__name__} {x[0]}")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return responses
"""


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("logging")
    (folder / "models" / "chatty" / "1").mkdir(parents=True)
    (folder / "models" / "chatty" / "1" / "model.py").write_text(CHATTY)
    (folder / "models" / "chatty" / "config.pbtxt").write_text('backend: "python"')
    with DaemonProcess(folder, [folder / "models"]) as daemon:
        yield daemon


def said(daemon: DaemonProcess, number: int) -> list[str]:
    """Sends a request; returns the lines that the model logged for it. An error is its last line."""
    status, _ = daemon.infer("chatty", [{"name": "x", "datatype": "INT32", "shape": [1], "data": [number]}])
    assert status == 200
    daemon.wait_log(f"log_error {number}\n")
    return [line for line in daemon.log.splitlines() if line.endswith(f" {number}")]


def test_levels_and_formats_reach_every_process(daemon: DaemonProcess) -> None:
    with triton.InferenceServerClient(daemon.url) as client:
        before = client.get_log_settings()
        assert before == {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
            "log_format": "default",
        }
        lines = said(daemon, 1)
        assert [line[0] for line in lines] == ["I", "E"]
        assert all(" worker-0] " in line for line in lines)

        changed = client.update_log_settings({"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"})
        assert changed == before | {"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"}
        worker = daemon.workers[0].pid
        assert [line.split()[1] for line in said(daemon, 3)] == ["DEBUG", "ERROR"]
        # The supervisor and what it is asked.
        client.get_model_repository_index()
        daemon.wait_log("DEBUG supervisor: operation RepositoryIndex")

        # A process that starts later begins with the settings of now.
        os.kill(worker, signal.SIGKILL)
        assert [line.split()[1] for line in said(daemon, 4)] == ["DEBUG", "ERROR"]
        assert daemon.workers[0].pid != worker

        with pytest.raises(InferenceServerException, match="can not be updated through network protocol"):
            client.update_log_settings({"log_file": str(daemon.folder / "other.log"), "log_info": True})
        assert client.get_log_settings() == changed
        assert not (daemon.folder / "other.log").exists()

    # A reload puts the file's settings into force again.
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: json.loads(daemon.get("/v2/logging")[1]) == before, "the reload", daemon)
