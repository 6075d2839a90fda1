"""A call whose deadline passes while its request waits in a queue."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonProcess, wait_until
from tests.scrapes import scrape


def test_it_is_told_so_and_counted_once(daemon: DaemonProcess, tmp_path: Path) -> None:
    """The clocks of the client, the front and the worker end at about the same time; whichever is first, the answer is one."""
    began, until = tmp_path / "began", tmp_path / "until"
    given = grpcclient.InferInput("DELAY_MS", [1], "INT32")
    given.set_data_from_numpy(np.zeros(1, np.int32))
    answers: list[str] = []

    def note(result: object, error: InferenceServerException | None) -> None:
        answers.append("answered" if error is None else str(error.status()))

    def counted(reason: str) -> float:
        return scrape(daemon.metrics_url).model("nv_inference_request_failure", "sleepy", reason=reason)

    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        parameters = {"began": str(began), "until": str(until)}
        first = client.async_infer("sleepy", [given], callback=lambda *_: None, parameters=parameters)
        wait_until(began.exists, "it runs")
        canceled, rejected = counted("CANCELED"), counted("REJECTED")
        for _ in range(40):
            client.async_infer("sleepy", [given], callback=note, client_timeout=0.5)
        wait_until(lambda: len(answers) == 40, "all are answered")
        until.touch()
        assert first is not None
        wait_until(lambda: counted("CANCELED") == canceled + 40, "all are counted")
    assert answers == ["StatusCode.DEADLINE_EXCEEDED"] * 40
    assert counted("REJECTED") == rejected
