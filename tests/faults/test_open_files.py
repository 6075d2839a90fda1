"""Processes that have as many files open as they may: what needs one more gets an error at once, and all else is answered."""

from __future__ import annotations

import contextlib
import re
import resource
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.open_files import no_descriptors_left

#: Larger than the arenas' first segment: each such tensor has a segment, and a descriptor, of its own.
_LARGE = 6 << 20
_TEXT = r"as many (files )?open as it may"


@pytest.fixture(scope="module")
def serve(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], DaemonProcess]]:
    """Starts another daemon."""
    repository = repositories.echo_models(tmp_path_factory.mktemp("repository"), ["FP32"])
    with contextlib.ExitStack() as stack:

        def serve() -> DaemonProcess:
            # Nothing of a free segment is kept, so each large tensor needs a new one.
            options = {"arenas": {"keep_byte_size": 0}}
            daemon = stack.enter_context(DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options))
            daemon.wait_ready()
            return daemon

        yield serve


@pytest.fixture(scope="module")
def daemon(serve: Callable[[], DaemonProcess]) -> DaemonProcess:
    return serve()


def echo(library: Any, client: Any, byte_size: int) -> None:
    """Sends a request and checks the answer. Raises InferenceServerException: the server refuses it."""
    values = np.random.default_rng(byte_size).random(byte_size // 4, np.float32)
    given = library.InferInput("x", [values.size], "FP32")
    given.set_data_from_numpy(values)
    answer = client.infer("echo_fp32", [given])
    assert np.array_equal(answer.as_numpy("y"), values)


@pytest.mark.parametrize("library", [httpclient, grpcclient], ids=["http", "grpc"])
@pytest.mark.parametrize("whose", ["worker", "front"])
def test_a_process_without_descriptors(daemon: DaemonProcess, library: Any, whose: str) -> None:
    """
    1. A worker or a front may open no more files. A large request, whose body it would have to map, on a connection that is
       there, gets 503 with the limit.
    2. Small ones are answered, over HTTP and others' as well where it is the worker, and no process is replaced.
    3. It may again: the same request is answered on the same connection.
    """
    (worker,) = daemon.workers
    (front,) = daemon.fronts if library is httpclient else daemon.children("tensord.daemon.grpc")
    url = daemon.url if library is httpclient else daemon.grpc_url
    bystander = httpclient.InferenceServerClient(daemon.url, connection_timeout=PATIENCE, network_timeout=PATIENCE)
    with library.InferenceServerClient(url) as client, contextlib.closing(bystander):
        echo(library, client, 64)
        echo(httpclient, bystander, 256)
        with no_descriptors_left((worker if whose == "worker" else front).pid) as limit:
            for _ in range(3):
                with pytest.raises(InferenceServerException, match=_TEXT) as refused:
                    echo(library, client, _LARGE)
                assert refused.value.status() in ("503", "StatusCode.UNAVAILABLE")
                assert str(limit) in refused.value.message()
                echo(library, client, 64)
                echo(httpclient, bystander, 256)
        for _ in range(3):
            echo(library, client, _LARGE)
            echo(httpclient, bystander, 256)
    assert [process.pid for process in daemon.workers] == [worker.pid]
    assert front.is_running()
    assert "Traceback" not in daemon.log


@pytest.mark.parametrize("library", [httpclient, grpcclient], ids=["http", "grpc"])
def test_the_last_large_answer_is_let_go(daemon: DaemonProcess, library: Any) -> None:
    """The front's mapping of its segment, and so its pages, go when its bytes have left, and not with the next answer."""
    (front,) = daemon.fronts if library is httpclient else daemon.children("tensord.daemon.grpc")
    url = daemon.url if library is httpclient else daemon.grpc_url
    with library.InferenceServerClient(url) as client:
        echo(library, client, 64)
        echo(library, client, 300_000)  # what all large ones need is there
        held = mapped(front.pid)
        for _ in range(3):
            echo(library, client, _LARGE)
            wait_until(lambda: mapped(front.pid) <= held, "the segments to be closed", daemon)


def mapped(pid: int) -> int:
    """Returns how many bytes of arenas a process has mapped."""
    ranges = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/memfd:tensord " in line]
    return sum(int(end, 16) - int(start, 16) for start, end in (words[0].split("-") for words in ranges))


@pytest.mark.parametrize("who", ["worker", "supervisor"])
def test_regions_stop_at_the_reserve(serve: Callable[[], DaemonProcess], who: str) -> None:
    """
    1. A client registers regions until it is refused: 503 with both numbers, long before the descriptors are used up.
    2. Large requests are answered. 3. A region fewer, and one can be registered again.
    """
    daemon = serve()  # whose limit stays as it is set here
    pid = daemon.workers[0].pid if who == "worker" else daemon.pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (128, 128))
    name = f"tensord-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm", name)
    path.write_bytes(bytes(4096))
    client = httpclient.InferenceServerClient(daemon.url, connection_timeout=PATIENCE, network_timeout=PATIENCE)
    try:
        count, refused = 0, None
        while refused is None:
            try:
                client.register_system_shared_memory(f"{name}-{count}", f"/{name}", 4096)
                count += 1
            except InferenceServerException as error:
                refused = error
        assert refused.status() == "503"
        assert re.search(r"\d+ files are open .*, 96 are allowed .* is 128", refused.message())
        assert count > 16
        for _ in range(3):
            echo(httpclient, client, _LARGE)
        assert len(client.get_system_shared_memory_status()) == count
        client.unregister_system_shared_memory(f"{name}-0")
        client.register_system_shared_memory(f"{name}-again", f"/{name}", 4096)
        client.unregister_system_shared_memory()
    finally:
        client.close()
        path.unlink()
    assert "Traceback" not in daemon.log
