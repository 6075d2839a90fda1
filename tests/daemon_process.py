"""Runs a real daemon for tests, with its own ports and cache; all of its processes are known and gone at the end."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

from tests import on_stub, prepared, run_folder
from tests.written_log import WrittenLog

ROOT = Path(__file__).parent.parent
#: Generous: these machines are shared, and no test decides by time.
PATIENCE = 240.0
_PROGRAM = (sys.executable, "-m", "tensord")
_SERVED_ON = r"serving http on http://127\.0\.0\.1:(\d+)"


class DaemonProcess:
    """Runs ``tensord serve`` as a child process. Use as a context manager."""

    def __init__(
        self,
        folder: Path,
        repositories: Sequence[Path],
        options: dict[str, dict[str, Any]] | None = None,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        ready: bool = True,
    ):
        """Sets up the daemon; ``start`` starts it.

        ``environment``: variables added to those of this process. ``ready``: a ``with`` block begins once the
        daemon is ready, if it serves HTTP over plain TCP.
        """
        self.folder = folder
        self._ready_first = ready
        #: Flags after --config.
        self.arguments = arguments
        self.config = folder / "tensord.toml"
        sections: dict[str, dict[str, Any]] = {
            "repository": {"paths": [str(path) for path in repositories]},
            # Bounds that a busy machine does not reach. A test of a bound sets that one.
            "http": {
                "port": 0,
                "head_timeout": PATIENCE,
                "keep_alive_timeout": 4 * PATIENCE,
                "write_timeout": PATIENCE,
                "min_rate": 0,
            },
            "grpc": {"port": 0, "head_timeout": PATIENCE, "write_timeout": PATIENCE, "min_rate": 0},
            "metrics": {"port": 0},
            "workers": {"device": "cpu", "pin": False, "idle_timeout": PATIENCE},
            "arenas": {"byte_size": 1 << 20, "wait": PATIENCE},
            "requests": {"worker_wait": PATIENCE},
            "supervisor": {"exit_timeout": PATIENCE / 2},
            "expert": {"start_timeout": PATIENCE},
            "executables": {"cache_directory": run_folder.programs()},
        }
        for section, values in (options or {}).items():
            sections.setdefault(section, {}).update(values)
        self.environment = on_stub.move(folder, sections["workers"], environment or {})
        #: Of its workers' devices, "cuda" with --on-stub.
        self.platform: str = sections["workers"]["device"]
        self.write_config(sections)
        self.sections = sections
        self._log = WrittenLog()
        self._process: subprocess.Popen[bytes] | prepared.Process | None = None
        self._stopped = False
        self.port = 0
        #: Another installation's, for those who test one.
        self.program: Sequence[str] = _PROGRAM
        #: Descriptors that such a program gets.
        self.pass_fds: Sequence[int] = ()
        self.cwd = ROOT
        #: What the log says once it serves.
        self.served_on = _SERVED_ON

    def write_config(self, sections: dict[str, dict[str, Any]]) -> None:
        """Replaces the configuration file, which a SIGHUP makes the daemon read."""
        lines: list[str] = []
        for section, values in sections.items():
            lines.append(f"[{section}]")
            # JSON scalars and arrays are TOML as well.
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        self.config.write_text("\n".join(lines) + "\n")

    def __enter__(self) -> DaemonProcess:
        self.start()
        if self._ready_first and self.served_on == _SERVED_ON:
            try:
                self.wait_ready()
            except BaseException:
                self.stop()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the daemon and waits until its log says where it serves."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TENSORD_")} | self.environment
        arguments = ["serve", "--config", str(self.config), *self.arguments]
        if self.program is _PROGRAM:
            self._process = prepared.start(
                ["tensord", *arguments],
                environment=environment,
                cwd=self.cwd,
                new_session=True,
                output=None,
                errors=self._log.fileno(),
            )
        else:
            self._process = subprocess.Popen(
                [*self.program, *arguments],
                cwd=self.cwd,
                env=environment,
                pass_fds=self.pass_fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                start_new_session=True,
            )
        self._stopped = False
        self.wait_log(self.served_on)
        ports = re.findall(r"serving http on http://127\.0\.0\.1:(\d+)", self.log)
        self.port = int(ports[-1]) if ports else 0

    def stop(self) -> int:
        """Sends SIGTERM, then kills all processes that are left. Returns the exit status."""
        assert self._process is not None
        if self._stopped:
            assert self._process.returncode is not None
            return self._process.returncode
        family = self.everybody()
        try:
            return end_group(self._process, signal.SIGTERM)
        finally:
            self._stopped = True
            psutil.wait_procs(family, timeout=PATIENCE)
            self._log.close()

    @property
    def log(self) -> str:
        """Returns what the daemon wrote to standard error so far."""
        return self._log.text

    @property
    def url(self) -> str:
        """Returns the HTTP front's HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    @property
    def grpc_url(self) -> str:
        """Returns the gRPC front's HOST:PORT; waits until it serves."""
        self.wait_log(r"grpc://127\.0\.0\.1:(\d+)")
        return "127.0.0.1:" + re.findall(r"grpc://127\.0\.0\.1:(\d+)", self.log)[-1]

    @property
    def metrics_url(self) -> str:
        """Returns the HOST:PORT that Prometheus scrapes."""
        self.wait_log(r"serving metrics on ")
        return re.findall(r"serving metrics on http://(\S+)/metrics", self.log)[-1]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        """Sends a signal to the supervisor."""
        os.kill(self.pid, number)

    def family(self) -> list[psutil.Process]:
        """Returns the supervisor, its fronts and its workers, without what models start."""
        return self._processes(recursive=False)

    def everybody(self) -> list[psutil.Process]:
        """Returns the supervisor and all processes that descend from it."""
        return self._processes(recursive=True)

    def _processes(self, *, recursive: bool) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self.pid)
            return [supervisor, *supervisor.children(recursive)]
        return []

    def children(self, module: str) -> list[psutil.Process]:
        """Returns the daemon's children that run ``python -m module``."""
        found = []
        for process in self.everybody()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if module in process.cmdline():
                    found.append(process)
        return found

    @property
    def workers(self) -> list[psutil.Process]:
        return self.children("tensord.workers")

    @property
    def fronts(self) -> list[psutil.Process]:
        return self.children("tensord.daemon.http")

    def get(self, path: str) -> tuple[int, bytes]:
        """Sends a GET; returns status and body."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None):
        """Sends a request on a connection of its own; returns status and body."""
        asked = urllib.request.Request(f"http://{self.url}{path}", body, headers or {}, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def infer(self, model: str, inputs: list[dict[str, Any]], **fields: Any) -> tuple[int, dict[str, Any]]:
        """Sends a JSON inference request; returns status and decoded answer."""
        body = json.dumps({"inputs": inputs, **fields}).encode()
        status, answer = self.request("POST", f"/v2/models/{model}/infer", body)
        return status, json.loads(answer)

    def wait_ready(self) -> None:
        """Waits until /v2/health/ready says 200 and every front is up.

        Where there are few cores the fronts start one after the other.
        """
        wait_until(lambda: self._quietly_ready(), "the daemon to be ready", self)
        for protocol in ("http", "grpc"):
            if self.sections.get(protocol, {}).get("enabled", True):
                for row in range(self.sections.get(protocol, {}).get("processes", 1)):
                    self.wait_log(rf"{protocol}-{row} \(process \d+\) is up")

    def _quietly_ready(self) -> bool:
        try:
            return self.get("/v2/health/ready")[0] == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def wait_log(self, pattern: str, count: int = 1) -> None:
        """Waits until the log has ``count`` matches of a pattern."""
        wait_until(lambda: len(re.findall(pattern, self.log)) >= count, f"{pattern!r} in the log", self)


#: Type of the fixture ``daemon_of``.
DaemonOf = Callable[..., DaemonProcess]


def tensorctl_status(control: Path) -> dict[str, Any]:
    """Returns the JSON of ``tensorctl status`` for the daemon with a control socket."""
    done = prepared.run(["tensord.daemon.ctl", "--socket", str(control), "--json", "status"])
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def wait_until(condition: Any, what: str, daemon: DaemonProcess | None = None) -> None:
    """Waits until a condition holds.

    One that never does fails the test, which says what was waited for and shows the daemon's log.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if daemon is not None and daemon._process is not None and has_ended(daemon._process):
            if condition():
                return
            raise AssertionError(f"the daemon exited with {daemon._process.poll()} before {what}:\n{daemon.log}")
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {PATIENCE} s:\n{daemon.log if daemon else ''}")
        time.sleep(0.02)


def end_group(leader: subprocess.Popen[bytes] | prepared.Process, number: int) -> int:
    """Asks the leader of a process group to end, then kills the rest of the group. Returns the leader's exit status.

    The group is killed before its leader is reaped: afterwards another process may have the leader's process id.
    """
    if leader.returncode is not None:
        return leader.returncode
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader.pid, number)
    deadline = time.monotonic() + PATIENCE
    while not has_ended(leader) and time.monotonic() < deadline:
        time.sleep(0.01)
    in_time = has_ended(leader)
    if leader.returncode is None:
        os.killpg(leader.pid, signal.SIGKILL)
    status = leader.wait()
    assert in_time, f"it did not end within {PATIENCE} s"
    return status


def has_ended(process: subprocess.Popen[bytes] | prepared.Process) -> bool:
    """Returns whether a process has ended, without reaping it, so that no other process gets its id."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        # psutil waited for it already.
        return process.poll() is not None


#: Names of tests, and of the benchmarks' clients that tests use: those beside this one have some.
_OF_TESTS = ("tensord-test", "tensord-bench")


def shared_memory_names() -> set[str]:
    """Returns the names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def descriptors() -> dict[str, str]:
    """Returns the descriptors of this process: number -> what it is open on."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails if the block leaves processes, descriptors or names in /dev/shm behind.

    Client libraries keep some for the life of this process (event loops of gevent, the pipe to multiprocessing's resource
    tracker), which do not count, and the processes that others are forked off stay until the end. /dev/shm is shared with tests
    that run at the same time, so only names that no test makes count: there must be none.
    """
    resource_tracker.ensure_running()
    fds, children = descriptors(), set(psutil.Process().children())
    yield
    left: list[str] = []
    deadline = time.monotonic() + PATIENCE / 4
    while time.monotonic() < deadline:
        processes = [process for process in set(psutil.Process().children()) - children if process.is_running()]
        left = [str(process) for process in processes if process.pid not in prepared.firsts()]
        others = {fd: what for fd, what in descriptors().items() if int(fd) not in prepared.firsts().values()}
        left += [what for fd, what in others.items() if fd not in fds and not what.startswith("anon_inode:")]
        left += [
            name for name in shared_memory_names() if "tensord" in name and not any(word in name for word in _OF_TESTS)
        ]
        if not left:
            return
        gc.collect()  # what only an exception's traceback still holds is not left
        time.sleep(0.05)
    raise AssertionError(f"left behind: {left}")
