"""Random histories of regions against a small model of the rules: who may do what, and what is there afterwards."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until

COUNT = 1024
SIZE = 4 * COUNT
NAMES = st.sampled_from("abc")
CLIENTS = st.sampled_from(["tcp", "user"])
#: A process that hands sealed memory over and waits for its end. The memory holds its number, everywhere.
OWNER = """
import array, fcntl, json, os, socket, sys
path, name, number, size = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
fd = os.memfd_create("tensord-test", os.MFD_ALLOW_SEALING)
os.write(fd, array.array("f", [number] * (size // 4)).tobytes())
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(path)
socket.send_fds(sock, [json.dumps({"register": {"name": name, "byte_size": size}}).encode()], [fd])
print(sock.recv(4096).decode(), flush=True)
sys.stdin.read()
"""


class RegionRules(RuleBasedStateMachine):
    """Runs random histories.

    ``regions``: name -> who registered it, the value it is full of, and the process it goes with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[str, tuple[str, float, subprocess.Popen[str] | None]] = {}
        self.number = 0.0
        self.made: list[Path] = []
        self.processes: list[subprocess.Popen[str]] = []

    @initialize(reclaim=st.sampled_from(["owner", "connection"]))
    def start(self, reclaim: str) -> None:
        self.reclaim = reclaim
        self.folder = tempfile.TemporaryDirectory(prefix="tensord-test-")
        folder = Path(self.folder.name)
        (folder / "daemon").mkdir()
        self.sockets = folder
        options: dict[str, dict[str, Any]] = {
            # A client's requests go to one front after the other.
            "http": {"port": 0, "processes": 2},
            "grpc": {"address": f"unix:{folder}/grpc.sock", "processes": 2},
            "workers": {"device": "cpu", "cpu": 2, "pin": False},
            "regions": {"reclaim": reclaim},
            "clients": {"socket": str(folder / "clients.sock")},
            "supervisor": {"control_socket": str(folder / "control.sock")},
        }
        self.daemon = DaemonProcess(folder / "daemon", [repositories.echo_models(folder / "models", ["FP32"])], options)
        self.daemon.start()
        self.daemon.wait_ready()
        self.clients = {"tcp": self.connected("tcp"), "user": self.connected("user")}
        self.turn = 0

    def teardown(self) -> None:
        for process in self.processes:
            self.end(process)
        for client in (*self.clients["tcp"], *self.clients["user"]):
            client.close()
        assert self.daemon.stop() == 0
        self.folder.cleanup()
        for path in self.made:
            path.unlink()

    @staticmethod
    def end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def connected(self, who: str) -> list[Any]:
        """Returns two connections, to two fronts if neither is slow to accept one."""
        if who == "tcp":
            return [
                httpclient.InferenceServerClient(self.daemon.url, network_timeout=PATIENCE, connection_timeout=PATIENCE)
                for _ in range(2)
            ]
        own = [("grpc.use_local_subchannel_pool", 1)]
        return [grpcclient.InferenceServerClient(f"unix:{self.sockets}/grpc.sock", channel_args=own) for _ in range(2)]

    def client(self, who: str) -> Any:
        self.turn += 1
        return self.clients[who][self.turn % 2]

    @rule(name=NAMES, who=CLIENTS)
    def register(self, name: str, who: str) -> None:
        self.number += 1
        path = Path("/dev/shm", f"tensord-test-{uuid.uuid4().hex}")
        path.write_bytes(np.full(COUNT, self.number, np.float32).tobytes())
        self.made.append(path)
        try:
            self.client(who).register_system_shared_memory(name, "/" + path.name, SIZE)
        except InferenceServerException as error:
            self.check_refusal(name, error.message())
        else:
            assert name not in self.regions
            self.regions[name] = (who, self.number, None)

    def check_refusal(self, name: str, message: str) -> None:
        """Checks that a refusal says that the name is taken, or that no worker is running."""
        if name in self.regions:
            assert f"'{name}' already in manager" in message
        else:
            assert "no worker is running" in message

    @rule(name=NAMES)
    def hand_over(self, name: str) -> None:
        self.number += 1
        arguments = [str(self.sockets / "clients.sock"), name, str(self.number), str(SIZE)]
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        if answer:
            self.check_refusal(name, answer["error"])
        else:
            assert name not in self.regions
            self.regions[name] = ("user", self.number, process)

    @rule(name=NAMES)
    def owner_dies(self, name: str) -> None:
        process = self.regions[name][2] if name in self.regions else None
        if process is not None:
            self.end(process)
            del self.regions[name]
            wait_until(lambda: name not in self.listed(), f"region {name} to be gone", self.daemon)

    @rule()
    def user_reconnects(self) -> None:
        """Closes the user's connections: regions stay unless they go with connections."""
        for client in self.clients["user"]:
            client.close()
        if self.reclaim == "connection":
            gone = [name for name, (who, _, process) in self.regions.items() if who == "user" and process is None]
            for name in gone:
                del self.regions[name]
            wait_until(lambda: not self.listed() & set(gone), f"{gone} to be gone", self.daemon)
        self.clients["user"] = self.connected("user")

    @rule(name=NAMES, who=CLIENTS)
    def infer(self, name: str, who: str) -> None:
        library = httpclient if who == "tcp" else grpcclient
        given = library.InferInput("x", [COUNT], "FP32")
        given.set_shared_memory(name, SIZE)
        try:
            values = self.client(who).infer("echo_fp32", [given]).as_numpy("y")
        except InferenceServerException as error:
            assert name not in self.regions
            assert f"Unable to find shared memory region: '{name}'" in error.message()
        else:
            assert set(values.tolist()) == {self.regions[name][1]}

    @rule(name=NAMES)
    def cancel(self, name: str) -> None:
        """Sends a request that uses a region, and disconnects before the answer."""
        place = {"shared_memory_region": name, "shared_memory_byte_size": SIZE}
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [COUNT], "parameters": place}]})
        with socket.create_connection(("127.0.0.1", self.daemon.port)) as sock:
            head = f"POST /v2/models/echo_fp32/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body.encode())

    @rule(name=NAMES, who=CLIENTS)
    def unregister(self, name: str, who: str) -> None:
        try:
            self.client(who).unregister_system_shared_memory(name)
        except InferenceServerException as error:
            assert (self.regions[name][0], who) == ("user", "tcp")
            assert f"'{name}' was registered by another user" in error.message()
        else:
            assert self.regions.get(name, ("tcp",))[0] == "tcp" or who == "user"
            self.forget(name)

    @rule(who=CLIENTS)
    def unregister_all(self, who: str) -> None:
        self.client(who).unregister_system_shared_memory()
        for name in [name for name, (owner, _, _) in self.regions.items() if owner == who]:
            self.forget(name)

    def forget(self, name: str) -> None:
        _, _, process = self.regions.pop(name, ("", 0.0, None))
        if process is not None:
            self.end(process)

    @rule(which=st.integers(0, 1))
    def worker_dies(self, which: int) -> None:
        """Kills a worker; the next rule runs while its successor starts."""
        workers = self.daemon.workers
        if len(workers) == 2:
            workers[which].kill()

    @rule(which=st.integers(0, 1), who=CLIENTS)
    def front_dies(self, which: int, who: str) -> None:
        """Kills a front; the other one answers while its successor starts."""
        fronts = self.daemon.children("tensord.daemon.http" if who == "tcp" else "tensord.daemon.grpc")
        if len(fronts) == 2:
            fronts[which].kill()
            psutil.wait_procs([fronts[which]], timeout=120)
            for client in self.clients[who]:
                client.close()
            self.clients[who] = self.connected(who)

    def listed(self) -> set[str]:
        return {entry["name"] for entry in self.client("tcp").get_system_shared_memory_status()}

    @invariant()
    def what_is_listed_is_what_was_registered(self) -> None:
        # What is unregistered is listed until the requests that were cancelled have ended.
        wait_until(
            lambda: self.listed() == set(self.regions), "what is registered, and nothing else, listed", self.daemon
        )


RegionRules.TestCase.settings = settings(max_examples=4, stateful_step_count=25, deadline=None)
test_random_histories = RegionRules.TestCase
