"""Log settings changed by a client, seen in what the daemon's processes write. A real daemon, the published client."""

from __future__ import annotations

import json
import os
import signal

import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonOf, DaemonProcess, wait_until
from tests.repositories import answering, fields, write_model

CHATTY = answering("""
    x = given(request)
    for log in (pb_utils.Logger.log_info, pb_utils.Logger.log_verbose, pb_utils.Logger.log_error):
        log(f"{log.__name__} {x[0]}")
    return response(y=x)
""")


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("logging")
    write_model(folder / "models", "chatty", CHATTY, fields("x INT32 1", "y INT32 1"))
    return daemon_of(folder / "models", folder=folder)


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
