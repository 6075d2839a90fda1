"""Clients that take their memory away: it costs them their own requests and nobody else anything.

A processor meets missing pages under the fault guard. A GPU's driver, of which the tests' stand-in assumes the worst, never may:
it would cost everybody the device.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tensord.shm import guard
from tests import repositories
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, wait_until
from tests.faults.load import CheckedLoad
from tests.generated import times
from tests.on_stub import daemon_on

pytestmark = pytest.mark.skipif(not guard.available, reason="the C extension was not built")

SIZE = 1 << 20
VALUES = np.arange(SIZE // 4, dtype=np.float32)
#: Of an object with holes a GPU worker locks no pages.
sparse = pytest.mark.parametrize("sparse", [False, True], ids=["backed", "sparse"])

THROUGH = repositories.of_x("x", "FP32[n]", more="host = True")


@contextlib.contextmanager
def hostile_object(client: httpclient.InferenceServerClient, sparse: bool = False) -> Iterator[tuple[str, Path]]:
    """Registers a region of a megabyte that will lose its memory. ``sparse``: its second half was never written."""
    name = f"tensord-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm", name)
    path.write_bytes(VALUES[: len(VALUES) // (1 + sparse)].tobytes())
    os.truncate(path, SIZE)
    client.register_system_shared_memory(name, "/" + name, SIZE)
    try:
        yield name, path
    finally:
        client.unregister_system_shared_memory(name)
        path.unlink(missing_ok=True)


def whole(region: str) -> httpclient.InferInput:
    made = httpclient.InferInput("x", [SIZE // 4], "FP32")
    made.set_shared_memory(region, SIZE)
    return made


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return CudaStub(tmp_path_factory.mktemp("cuda"), delay_us=300)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def daemon(
    request: pytest.FixtureRequest, leaves_nothing: None, stub: CudaStub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    repository = repositories.echo_models(tmp_path_factory.mktemp("repository"), ["FP32", "BYTES", "BOOL"])
    repositories.scale_model(repository)
    repositories.write_model(repository, "through", THROUGH)
    options, environment = daemon_on(request.param, stub)
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options, environment=environment) as running:
        yield running


@contextlib.contextmanager
def attacking(attack: Callable[[], None]) -> Iterator[None]:
    """Attacks again and again, in a thread, until the ``with`` block ends."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            attack()

    attacker = threading.Thread(target=run)
    attacker.start()
    try:
        yield
    finally:
        stop.set()
        attacker.join()


@sparse
def test_a_truncated_input(daemon: DaemonProcess, sparse: bool) -> None:
    """
    1. A region is registered and used. 2. Its owner truncates it and uses it again.
    Result: an error that says so, for that region alone; registering it again heals it; the worker is the same.
    """
    workers = {worker.pid for worker in daemon.workers}
    with (
        httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client,
        CheckedLoad(daemon, 4) as load,
        hostile_object(client, sparse) as (region, path),
    ):
        values = client.infer("echo_fp32", [whole(region)]).as_numpy("y")
        assert np.array_equal(values, np.where(sparse & (len(VALUES) // 2 <= VALUES), 0, VALUES))
        os.truncate(path, 4096)
        for _ in range(3):
            with pytest.raises(InferenceServerException, match=f"'{region}' lost its memory"):
                client.infer("echo_fp32", [whole(region)])
        path.write_bytes(bytes(SIZE))
        client.unregister_system_shared_memory(region)
        client.register_system_shared_memory(region, "/" + region, SIZE)
        assert not client.infer("echo_fp32", [whole(region)]).as_numpy("y").any()
    assert {worker.pid for worker in daemon.workers} == workers
    assert load.errors == []
    assert load.wrong == 0


@sparse
def test_what_a_model_hands_through(daemon: DaemonProcess, stub: CudaStub, sparse: bool) -> None:
    """
    1. A model that computes on the host answers with its very input, a region's memory, into a region on a GPU. 2. The first
    region is truncated. 3. It is asked again.
    Result: an error that says so; the worker is the same.
    """
    workers = {worker.pid for worker in daemon.workers}
    with (
        httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client,
        CudaOwner(os.environ | stub.environment) as owner,
        hostile_object(client, sparse) as (region, path),
    ):
        client.register_cuda_shared_memory("gpu", owner.create("gpu", SIZE), 0, SIZE)
        wanted = httpclient.InferRequestedOutput("y")
        wanted.set_shared_memory("gpu", SIZE)
        client.infer("through", [whole(region)], outputs=[wanted])
        assert np.array_equal(owner.get("gpu", np.float32, VALUES.shape), np.fromfile(path, np.float32))
        os.truncate(path, 4096)
        with pytest.raises(InferenceServerException, match=f"'{region}' lost its memory"):
            client.infer("through", [whole(region)], outputs=[wanted])
        client.unregister_cuda_shared_memory("gpu")
    assert {worker.pid for worker in daemon.workers} == workers


@sparse
def test_a_truncated_output(daemon: DaemonProcess, sparse: bool) -> None:
    """
    1. The region named for the output is used, and then truncated to nothing before the next request.
    Result: an error; nothing was written anywhere else.
    """
    with (
        httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client,
        hostile_object(client, sparse) as (region, path),
    ):
        body = httpclient.InferInput("x", [SIZE // 4], "FP32")
        body.set_data_from_numpy(np.ones(SIZE // 4, np.float32))
        wanted = httpclient.InferRequestedOutput("y")
        wanted.set_shared_memory(region, SIZE)
        client.infer("echo_fp32", [body], outputs=[wanted])
        assert (np.fromfile(path, np.float32) == 1).all()
        os.truncate(path, 0)
        with pytest.raises(InferenceServerException, match="lost its memory"):
            client.infer("echo_fp32", [body], outputs=[wanted])
        assert path.stat().st_size == 0


def test_truncated_and_grown_all_the_time(daemon: DaemonProcess) -> None:
    """
    1. An attacker truncates and grows its object without pause while it uses it; others do their work.
    Result: the attacker gets answers or errors, everybody else right answers, and no worker dies.
    """
    workers = {worker.pid for worker in daemon.workers}
    refused = asked = 0
    with (
        httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client,
        CheckedLoad(daemon, 4) as load,
        hostile_object(client) as (region, path),
        attacking(lambda: [os.truncate(path, size) for size in (0, SIZE)]),
    ):
        while asked < 100 or not refused:
            asked += 1
            try:
                client.infer("echo_fp32", [whole(region)])
            except InferenceServerException as error:
                refused += 1
                assert region in error.message()
                client.unregister_system_shared_memory(region)
                with contextlib.suppress(InferenceServerException):
                    client.register_system_shared_memory(region, "/" + region, SIZE)
    assert {worker.pid for worker in daemon.workers} == workers
    assert load.errors == []
    assert load.wrong == 0


def test_elements_that_change_while_they_are_read(daemon: DaemonProcess) -> None:
    """
    1. An attacker rewrites the length of a BYTES element, and a truth value, without pause while its requests use them.
    Result: answers, or errors about that input; no worker dies.
    """
    workers = {worker.pid for worker in daemon.workers}
    good, refused = 512 * (struct.pack("<I", 4) + b"abcd"), list[str]()
    with (
        httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client,
        hostile_object(client) as (region, path),
        contextlib.ExitStack() as closing,
    ):
        path.write_bytes(good.ljust(SIZE, b"\0"))
        file = closing.enter_context(path.open("r+b", buffering=0))

        def attack() -> None:
            for length in (4, 0xFFFFFFFF, 0, 1 << 31, 5):
                os.pwrite(file.fileno(), struct.pack("<I", length), 800)

        closing.enter_context(attacking(attack))
        for number in itertools.count():
            if number >= 40 and refused:
                break
            for datatype, count in (("BYTES", 512), ("BOOL", len(good))):
                given, wanted = httpclient.InferInput("x", [count], datatype), httpclient.InferRequestedOutput("y")
                given.set_shared_memory(region, len(good))
                wanted.set_shared_memory(region, SIZE // 2, offset=SIZE // 2)
                try:
                    client.infer(f"echo_{datatype.lower()}", [given], outputs=[wanted])
                except InferenceServerException as error:
                    refused.append(error.message())
    assert all("'x'" in text for text in refused), refused[:3]
    assert {worker.pid for worker in daemon.workers} == workers


#: Runs in a mount namespace of its own, in which /dev/shm holds 4 MiB.
FULL = """
import sys
from pathlib import Path
import numpy as np, tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException
from tests import repositories
from tests.daemon_process import ROOT, DaemonProcess, wait_until

folder, access = Path(sys.argv[1]), sys.argv[2]
sparse = Path("/dev/shm/tensord-test-sparse")
sparse.touch()
import os
os.truncate(sparse, 16 << 20)
Path("/dev/shm/tensord-test-filler").write_bytes(bytes((4 << 20) - 65536))
with DaemonProcess(folder, [repositories.echo_models(folder / "r", ["FP32"])], {"regions": {"access": access}}) as daemon:
    daemon.wait_ready()
    workers = [worker.pid for worker in daemon.workers]
    with httpclient.InferenceServerClient(daemon.url) as client:
        client.register_system_shared_memory("sparse", "/tensord-test-sparse", 16 << 20)
        given = httpclient.InferInput("x", [1 << 20], "FP32")
        given.set_data_from_numpy(np.ones(1 << 20, np.float32))
        wanted = httpclient.InferRequestedOutput("y")
        wanted.set_shared_memory("sparse", 4 << 20)
        try:
            client.infer("echo_fp32", [given], outputs=[wanted])
        except InferenceServerException as error:
            print("refused:", error.message())
        assert client.infer("echo_fp32", [given]).as_numpy("y").all()
        client.unregister_system_shared_memory("sparse")
        Path("/dev/shm/tensord-test-filler").unlink()
        client.register_system_shared_memory("sparse", "/tensord-test-sparse", 4 << 20)
        try:
            client.infer("echo_fp32", [given], outputs=[wanted])
        except InferenceServerException as error:
            print("refused again:", error.message())
        client.unregister_system_shared_memory("sparse")
    assert [worker.pid for worker in daemon.workers] == workers
    print("alive")
"""


@pytest.mark.parametrize("access", ["guarded", "snapshot"])
def test_a_full_dev_shm(tmp_path: Path, access: str) -> None:
    """
    1. /dev/shm is full; a sparse region is named for an output. 2. There is room again, and the region is registered again.
    Result: an error that says that memory was missing, then a good answer; the worker is the same all the time.
    """
    (tmp_path / "daemon").mkdir()
    mount = 'mount -t tmpfs -o size=4m tmpfs /dev/shm || exit 77; exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", FULL, str(tmp_path / "daemon"), access],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("a mount namespace of our own is not allowed here")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "alive"
    assert lines[0].startswith("refused:")
    assert "memory" in lines[0]
    assert len(lines) == 2


def test_rounds_leave_nothing(daemon: DaemonProcess) -> None:
    """
    1. A region is registered, used both ways, unregistered, many times after some to warm up.
    Result: as many descriptors and mappings as before; resident memory within what the allocators keep.
    """
    (worker,) = daemon.workers
    with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE) as client:

        def rounds(count: int) -> None:
            for _ in range(count):
                with hostile_object(client) as (region, path):
                    wanted = httpclient.InferRequestedOutput("y")
                    wanted.set_shared_memory(region, SIZE // 2, offset=SIZE // 2)
                    half = httpclient.InferInput("x", [SIZE // 8], "FP32")
                    half.set_shared_memory(region, SIZE // 2)
                    client.infer("echo_fp32", [half], outputs=[wanted])
                    content = path.read_bytes()
                    assert content[: SIZE // 2] == content[SIZE // 2 :]

        def held() -> tuple[list[int], list[int], int]:
            """Descriptors and mappings of each process, and the worker's resident memory."""
            family = daemon.family()
            maps = [len(process.memory_maps(grouped=False)) for process in family]
            return [process.num_fds() for process in family], maps, worker.memory_info().rss

        rounds(times(100, 40))
        fds, maps, resident = held()
        rounds(times(300, 100))
        # Threads and connections come and go by themselves; so many regions would be so many.
        wait_until(
            lambda: all(after - before <= 16 for before, after in zip(fds, held()[0], strict=True)),
            "about as many descriptors as before",
            daemon,
        )
        _, maps_after, resident_after = held()
    # An arena of an allocator or a thread's stack is a mapping or two.
    assert all(after - before <= 32 for before, after in zip(maps, maps_after, strict=True)), (maps, maps_after)
    assert resident_after - resident < 24 << 20
