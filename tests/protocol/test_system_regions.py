"""System shared-memory regions through the stock client: both ways, every datatype, and everything that can be asked wrongly."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from tests.daemon_process import DaemonProcess, wait_until
from tests.protocol.tensors import TENSORS, same


class ClientRegion:
    """A region made by tritonclient and registered under a name of its own."""

    def __init__(self, client: httpclient.InferenceServerClient, byte_size: int) -> None:
        self.client = client
        self.name = f"r-{uuid.uuid4().hex}"
        self.key = f"/tensord-test-{uuid.uuid4().hex}"
        self.byte_size = byte_size
        self.handle = shm.create_shared_memory_region(self.name, self.key, byte_size)
        client.register_system_shared_memory(self.name, self.key, byte_size)

    def close(self) -> None:
        self.client.unregister_system_shared_memory(self.name)
        shm.destroy_shared_memory_region(self.handle)


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(daemon.url) as client:
        yield client


@pytest.fixture
def region(client: httpclient.InferenceServerClient) -> Iterator[ClientRegion]:
    region = ClientRegion(client, 1 << 16)
    yield region
    region.close()


def in_region(name: str, datatype: str, shape: tuple[int, ...], region: str, byte_size: int, offset: int) -> Any:
    made = httpclient.InferInput(name, list(shape), datatype)
    made.set_shared_memory(region, byte_size, offset=offset)
    return made


def out_region(name: str, region: str, byte_size: int, offset: int) -> Any:
    made = httpclient.InferRequestedOutput(name)
    made.set_shared_memory(region, byte_size, offset=offset)
    return made


@pytest.mark.parametrize("datatype", sorted(TENSORS))
@pytest.mark.parametrize("offset", [0, 64, 4096, 77])
def test_both_ways(client: Any, region: ClientRegion, datatype: str, offset: int) -> None:
    """Aligned and unaligned offsets; the answer names no data, the bytes are in the region."""
    values = TENSORS[datatype]
    stored = values
    if datatype == "BYTES":
        stored = serialize_byte_tensor(values)
        byte_size = len(stored.item())
    else:
        byte_size = values.nbytes
        stored = values.view(np.uint16) if datatype == "BF16" else values
    shm.set_shared_memory_region(region.handle, [stored], offset=offset)
    answer = client.infer(
        f"echo_{datatype.lower()}",
        [in_region("x", datatype, values.shape, region.name, byte_size, offset)],
        outputs=[out_region("y", region.name, byte_size, 32768 + offset)],
    )
    output = answer.get_output("y")
    assert "data" not in output
    assert output["shape"] == [3]
    got = shm.get_contents_as_numpy(region.handle, stored.dtype, [3], offset=32768 + offset)
    assert same(got, values if datatype == "BYTES" else stored)


def test_region_in_body_out_and_the_reverse(client: Any, region: ClientRegion) -> None:
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    shm.set_shared_memory_region(region.handle, [values])
    answer = client.infer("scale", [in_region("x", "FP32", (2, 4), region.name, 32, 0)])
    assert same(answer.as_numpy("y"), 3 * values + 1)
    body = httpclient.InferInput("x", [2, 4], "FP32")
    body.set_data_from_numpy(values)
    client.infer("scale", [body], outputs=[out_region("y", region.name, 4096, 8192)])
    assert same(shm.get_contents_as_numpy(region.handle, np.float32, [2, 4], offset=8192), 3 * values + 1)


def test_status_and_names(client: Any, region: ClientRegion) -> None:
    assert {"name": region.name, "key": region.key, "offset": 0, "byte_size": region.byte_size} in (
        client.get_system_shared_memory_status()
    )
    with pytest.raises(InferenceServerException, match="already in manager"):
        client.register_system_shared_memory(region.name, region.key, region.byte_size - 1)
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'nope'"):
        client.get_system_shared_memory_status("nope")
    client.unregister_system_shared_memory("nope")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_client_that_is_restarted_registers_the_same_again(daemon: DaemonProcess, client: Any, protocol: str) -> None:
    """
    1. A client registers a region and is killed: nobody unregisters it. 2. It comes again, makes its object anew and registers as
    before. 3. Its request names the region.
    Result: the registration is answered with 200, and the request reads and writes the new object.
    """
    library = httpclient if protocol == "http" else grpcclient
    name, key = f"r-{uuid.uuid4().hex}", f"/tensord-test-{uuid.uuid4().hex}"
    old = np.memmap(f"/dev/shm{key}", np.float32, "w+", shape=1024)
    client.register_system_shared_memory(name, key, 4096)
    for value in (1, 2):
        Path(f"/dev/shm{key}").unlink()
        new = np.memmap(f"/dev/shm{key}", np.float32, "w+", shape=1024)
        new[:] = value
        with library.InferenceServerClient(daemon.url if protocol == "http" else daemon.grpc_url) as restarted:
            restarted.register_system_shared_memory(name, key, 4096)
            restarted.register_system_shared_memory(name, key, 4096)
            given, wanted = library.InferInput("x", [4], "FP32"), library.InferRequestedOutput("y")
            given.set_shared_memory(name, 16)
            wanted.set_shared_memory(name, 16, offset=64)
            restarted.infer("echo_fp32", [given], outputs=[wanted])
        assert new[16:20].tolist() == [value] * 4
    assert not old.any()
    Path(f"/dev/shm{key}").unlink()
    # The object is gone: the region stays as it is.
    with pytest.raises(InferenceServerException, match="Unable to open shared memory region"):
        client.register_system_shared_memory(name, key, 4096)
    assert same(client.infer("echo_fp32", [in_region("x", "FP32", (4,), name, 16, 0)]).as_numpy("y"), new[:4])
    client.unregister_system_shared_memory(name)


def test_the_object_may_be_unlinked_and_the_region_lives_on(client: Any) -> None:
    region = ClientRegion(client, 4096)
    values = np.arange(4, dtype=np.float32)
    shm.set_shared_memory_region(region.handle, [values])
    shm.destroy_shared_memory_region(region.handle)
    answer = client.infer("echo_fp32", [in_region("x", "FP32", (4,), region.name, 16, 0)])
    assert same(answer.as_numpy("y"), values)
    client.unregister_system_shared_memory(region.name)


@pytest.mark.parametrize(
    ("key", "byte_size", "offset", "error"),
    [
        ("/tensord-test-no-such-object", 64, 0, "Unable to open shared memory region"),
        ("/../etc/passwd", 64, 0, "Unable to open shared memory region"),
        ("/sem.x", 64, 0, "invalid shm key"),
    ],
)
def test_what_cannot_be_registered(client: Any, key: str, byte_size: int, offset: int, error: str) -> None:
    with pytest.raises(InferenceServerException, match=error):
        client.register_system_shared_memory("bad", key, byte_size, offset)
    with pytest.raises(InferenceServerException):
        client.get_system_shared_memory_status("bad")


@pytest.mark.parametrize(
    ("byte_size", "offset", "said"),
    [
        (0, 0, "failed to register shared memory region 'bad-range': invalid args"),
        (0, 65537, "failed to register shared memory region 'bad-range': invalid args"),
        (65537, 0, "'bad-range': invalid args: 65537 bytes at offset 0, the object has 65536"),
        (65536, 4096, "'bad-range': invalid args: 65536 bytes at offset 4096, the object has 65536"),
        (2**63, 0, "bad-range"),
        (1, 2**63, "bad-range"),
        # Not a number of 64 bits any more.
        (2**64, 0, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
    ],
)
def test_registered_ranges_stay_inside_the_object(
    daemon: DaemonProcess, region: ClientRegion, byte_size: int, offset: int, said: str
) -> None:
    body = json.dumps({"key": region.key, "byte_size": byte_size, "offset": offset}).encode()
    status, answer = daemon.request("POST", "/v2/systemsharedmemory/region/bad-range/register", body)
    assert status == 400, answer
    assert said in json.loads(answer)["error"]


BAD_RANGES = [
    (16, 65536),
    (16, 65536 - 8),
    (16, -1),
    (16, 2**63 - 8),
    (16, 2**64 - 16),
    (16, 2**64),
    (12, 0),
    (20, 0),
    (0, 0),
    (2**64 + 16, 0),
    (-16, 0),
]


@pytest.mark.parametrize(("byte_size", "offset"), BAD_RANGES)
def test_input_ranges(daemon: DaemonProcess, region: ClientRegion, byte_size: int, offset: int) -> None:
    parameters = {
        "shared_memory_region": region.name,
        "shared_memory_byte_size": byte_size,
        "shared_memory_offset": offset,
    }
    status, answer = daemon.infer(
        "echo_fp32", [{"name": "x", "shape": [4], "datatype": "FP32", "parameters": parameters}]
    )
    assert status == 400, answer
    assert answer["error"]


def test_a_size_of_0_beyond_the_end_is_about_the_offset(daemon: DaemonProcess, region: ClientRegion) -> None:
    for offset, said in (
        (0, "offset + byte size"),
        (65535, "offset + byte size"),
        (65536, "offset"),
        (65537, "offset"),
    ):
        place = {"shared_memory_region": region.name, "shared_memory_byte_size": 0, "shared_memory_offset": offset}
        given = {"name": "x", "shape": [4], "datatype": "FP32", "parameters": place}
        status, answer = daemon.infer("echo_fp32", [given])
        assert (status, answer["error"]) == (400, f"Invalid {said} for shared memory region: '{region.name}'")


@pytest.mark.parametrize(("byte_size", "offset"), [*BAD_RANGES[:6], (2**64 + 16, 0), (-16, 0), (15, 0)])
def test_output_ranges(daemon: DaemonProcess, region: ClientRegion, byte_size: int, offset: int) -> None:
    before = bytes(region.handle._mpsm_handle.buf)
    status, answer = daemon.infer(
        "echo_fp32",
        [{"name": "x", "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]}],
        outputs=[
            {
                "name": "y",
                "parameters": {
                    "shared_memory_region": region.name,
                    "shared_memory_byte_size": byte_size,
                    "shared_memory_offset": offset,
                },
            }
        ],
    )
    assert status in (400, 500), answer
    assert answer["error"]
    assert bytes(region.handle._mpsm_handle.buf) == before


@pytest.mark.parametrize("renewed", [False, True])
def test_a_region_is_listed_until_the_request_that_uses_it_ends(
    daemon: DaemonProcess, client: Any, tmp_path: Path, renewed: bool
) -> None:
    """It is unregistered at once: no later request finds it. The one that uses it gets its whole answer; then it is gone.

    So it is, too, if it was registered again while the request ran, and its key had become another object.
    """
    region = ClientRegion(client, 4096)
    shm.set_shared_memory_region(region.handle, [np.array([1500], np.int32)])
    began, until = tmp_path / "began", tmp_path / "until"
    listed = client.get_system_shared_memory_status(region.name)
    with ThreadPoolExecutor(2) as pool:

        def ask() -> Any:
            # The client's connections belong to the thread that makes them.
            with httpclient.InferenceServerClient(daemon.url) as mine:
                return mine.infer(
                    "sleepy",
                    [in_region("DELAY_MS", "INT32", (1,), region.name, 4, 0)],
                    outputs=[out_region("OUTPUT", region.name, 4, 64)],
                    parameters={"began": str(began), "until": str(until)},
                )

        slow = pool.submit(ask)
        wait_until(began.exists, "the slow request to run")
        try:
            if renewed:
                Path(f"/dev/shm{region.key}").unlink()
                Path(f"/dev/shm{region.key}").write_bytes(bytes(4096))
                client.register_system_shared_memory(region.name, region.key, 4096)
            client.unregister_system_shared_memory(region.name)
            with pytest.raises(InferenceServerException, match="Unable to find shared memory region"):
                client.infer("sleepy", [in_region("DELAY_MS", "INT32", (1,), region.name, 4, 0)])
            client.unregister_system_shared_memory()
            assert client.get_system_shared_memory_status(region.name) == listed
            assert client.get_system_shared_memory_status() == listed
        finally:
            until.touch()
        assert slow.result().get_output("OUTPUT")["shape"] == [1]
        assert shm.get_contents_as_numpy(region.handle, np.int32, [1], offset=64).tolist() == [1500]
    wait_until(lambda: client.get_system_shared_memory_status() == [], "the region to be gone", daemon)
    with pytest.raises(InferenceServerException):
        client.get_system_shared_memory_status(region.name)
    shm.destroy_shared_memory_region(region.handle)


def test_cuda_endpoints_answer_truly_for_a_host_without_cuda(client: Any, daemon: DaemonProcess) -> None:
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory()
    status, answer = daemon.request(
        "POST",
        "/v2/cudasharedmemory/region/g/register",
        json.dumps({"raw_handle": {"b64": "A" * 88}, "device_id": 0, "byte_size": 64}).encode(),
    )
    assert status in (400, 501)
    assert json.loads(answer)["error"]
