"""The stock synchronous and asyncio HTTP clients: everything they offer that this server serves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.daemon_process import DaemonProcess
from tests.protocol.tensors import TENSORS, same


def client_of(daemon: DaemonProcess, **options: Any) -> httpclient.InferenceServerClient:
    return httpclient.InferenceServerClient(daemon.url, **options)


def tensor(name: str, datatype: str, values: Any, binary: bool = True) -> httpclient.InferInput:
    made = httpclient.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


@pytest.mark.parametrize("datatype", sorted(TENSORS))
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_any_length(daemon: DaemonProcess, datatype: str, count: int) -> None:
    """Nothing, one element, and more than travels inline."""
    values = np.resize(TENSORS[datatype], count)
    with client_of(daemon) as client:
        answer = client.infer(f"echo_{datatype.lower()}", [tensor("x", datatype, values)])
        assert same(answer.as_numpy("y"), values)
