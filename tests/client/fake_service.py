"""Provides a daemon and its worker that do what a test says, in a thread of the test: they serve lanes by the real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from tensord.shm.messages import WIRE_VERSION
from tests.daemon_process import PATIENCE

_LIMITS = {"in_flight": 4, "segments": 8, "segment_byte_size": 1 << 20, "response_byte_size": 1 << 20}
_X = {"datatype": "INT32", "shape": [1]}


class FakeService:
    """A daemon with one worker and the model ``m``, whose answer ``y`` is its input. Only its thread touches its sockets.

    Each method returns when the thread has done what it says.
    """

    def __init__(self, path: str, pure: bool = True) -> None:
        self.path = path
        #: How many requests the worker has answered, and how many cancellations it has read.
        self.received = self.cancelled = 0
        #: How often the daemon was asked for the model.
        self.asked = 0
        self._pure = pure
        #: Whether the daemon answers, whether it knows the model, whether the worker answers, and whether it refuses.
        self._answers = self._has_model = self._works = True
        self._refuses = self._ends = self._drains = False
        #: True: with its next lane a client gets a second one, to a worker that has ended.
        #: Then: the lanes of which the client has said that they ended.
        self._half_gone = False
        self.called_ended: list[int] = []
        self._listening: socket.socket | None = None
        #: The lanes of each connection of a client, by their numbers.
        self._connections: dict[socket.socket, dict[int, socket.socket]] = {}
        self._numbers = iter(range(1, 1 << 30))
        #: What was received and not answered.
        self._held: list[tuple[socket.socket, bytes]] = []
        self._told: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._wakes, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()
        self.back()

    def _do(self, what: Callable[[], None]) -> None:
        done = threading.Event()
        self._told.put((what, done))
        os.write(self._wake, b"\0")
        assert done.wait(PATIENCE)

    # ------------------------------------------------------------------------------------------------- what a test says

    def gone(self) -> None:
        """The worker's process ends; another one is there when the daemon is asked."""
        self._do(self._end_lanes)

    def half_gone(self) -> None:
        """The daemon tells the next client of a further worker, which has ended and which the daemon takes to be there."""
        self._do(lambda: setattr(self, "_half_gone", True))

    def unloaded(self) -> None:
        """The model is unloaded, and its worker, which had it alone, ends."""

        def unload() -> None:
            self._has_model = False
            self._end_lanes()

        self._do(unload)

    def refuses(self) -> None:
        """The model is unloaded, and its worker serves others."""

        def refuse() -> None:
            self._has_model, self._refuses = False, True

        self._do(refuse)

    def stop(self) -> None:
        """The daemon ends, and its worker."""

        def end() -> None:
            self._end_lanes()
            for connection in list(self._connections):
                connection.close()
            self._connections.clear()
            if self._listening is not None:
                self._listening.close()
                self._listening = None
                os.unlink(self.path)

        self._do(end)

    def silent(self) -> None:
        """The worker receives and does not answer."""
        self._do(lambda: setattr(self, "_works", False))

    def hears(self) -> None:
        """The worker answers what it receives from now on."""
        self._do(lambda: setattr(self, "_works", True))

    def drains(self) -> None:
        """The worker ends, and the daemon refuses at once whoever asks for another one."""

        def drain() -> None:
            self._drains = True
            self._end_lanes()

        self._do(drain)

    def refuses_lanes(self) -> None:
        """The daemon refuses at once whoever asks for lanes. The worker stays."""
        self._do(lambda: setattr(self, "_drains", True))

    def hangs(self) -> None:
        """The daemon does not answer."""
        self._do(lambda: setattr(self, "_answers", False))

    def back(self) -> None:
        """All is well again, and what was not answered is."""

        def serve() -> None:
            self._answers = self._has_model = self._works = True
            self._refuses = self._drains = False
            if self._listening is None:
                self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._listening.bind(self.path)
                self._listening.listen()
            held, self._held = self._held, []
            for sock, content in held:
                if sock.fileno() >= 0:
                    self._answer(sock, content)

        self._do(serve)

    def close(self) -> None:
        self.stop()
        self._do(lambda: setattr(self, "_ends", True))
        self._thread.join()
        os.close(self._wakes)
        os.close(self._wake)

    # --------------------------------------------------------------------------------------------------------- its thread

    def _main(self) -> None:
        while not self._ends:
            poll = select.poll()
            read: dict[int, Callable[[], None]] = {self._wakes: lambda: None}
            if self._listening is not None:
                read[self._listening.fileno()] = self._accept
            for connection, lanes in self._connections.items():
                read[connection.fileno()] = lambda each=connection: self._asked(each)  # type: ignore[misc]
                for number, lane in lanes.items():
                    read[lane.fileno()] = lambda of=connection, at=number: self._request(of, at)  # type: ignore[misc]
            for fd in read:
                poll.register(fd, select.POLLIN)
            ready = [fd for fd, _ in poll.poll()]
            if self._wakes in ready:
                os.read(self._wakes, 1)
                what, done = self._told.get()
                what()
                done.set()
                continue  # what was ready may be closed
            read[ready[0]]()

    def _accept(self) -> None:
        assert self._listening is not None
        self._connections[self._listening.accept()[0]] = {}

    def _end_lanes(self) -> None:
        for lanes in self._connections.values():
            for lane in lanes.values():
                lane.close()
            lanes.clear()

    def _asked(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if content := connection.recv(1 << 16):
                self._answer(connection, content)
                return
        for lane in self._connections.pop(connection).values():
            lane.close()
        connection.close()

    def _request(self, connection: socket.socket, number: int) -> None:
        lane = self._connections[connection][number]
        with contextlib.suppress(OSError):
            if content := lane.recv(1 << 16):
                self._answer(lane, content)
                return
        del self._connections[connection][number]
        lane.close()

    def _answer(self, sock: socket.socket, content: bytes) -> None:
        is_lane = sock not in self._connections
        if not (self._works if is_lane else self._answers):
            self._held.append((sock, content))
            return
        with contextlib.suppress(OSError):
            if is_lane:
                self._answer_records(sock, content)
            else:
                answer, fds = self._said(sock, json.loads(content))
                socket.send_fds(sock, [json.dumps(answer).encode()], fds)
                for fd in fds:
                    os.close(fd)

    def _said(self, connection: socket.socket, asked: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        if "hello" in asked:
            return {"server": "fake", "wire": WIRE_VERSION, "lanes": True, "http": []}, []
        self.asked += 1
        if self._drains:
            return {"error": "the server is draining: it opens no lanes", "code": "UNAVAILABLE"}, []
        if not self._has_model:
            return {"error": "Request for unknown model: 'm' is not found", "code": "NOT_FOUND"}, []
        lanes = self._connections[connection]
        fds = []
        known = [number for number in lanes if number not in asked["open"]["ended"]]
        for number in asked["open"]["ended"]:
            self.called_ended.append(number)
            if number in lanes:
                lanes.pop(number).close()
        if self._half_gone:
            self._half_gone = False
            theirs, lanes[next(self._numbers)] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            lanes[next(reversed(lanes))].shutdown(socket.SHUT_RDWR)
            fds.append(theirs.detach())
        if not known:
            theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.send(b"\x01" + msgspec.msgpack.encode([("V", WIRE_VERSION)]))
            lanes[next(self._numbers)] = ours
            fds.append(theirs.detach())
        answer = {
            "model": "m",
            "version": 1,
            "metadata": {
                "name": "m",
                "versions": ["1"],
                "inputs": [{"name": "x", **_X}],
                "outputs": [{"name": "y", **_X}],
            },
            "max_batch_size": 0,
            "streams": False,
            "sequences": False,
            "pure": self._pure,
            "limits": _LIMITS,
            "lanes": [{"lane": number, "new": number not in known} for number in lanes],
        }
        return answer, fds

    def _answer_records(self, lane: socket.socket, content: bytes) -> None:
        for record in msgspec.msgpack.decode(content[1:]):
            if record[0] == "X":
                self.cancelled += 1
            elif record[0] == "q":
                self.received += 1
                kind = ("A", 1, [("t", "y", "INT32", [1], None)], {}, True)
                code, text = ("NOT_FOUND", "Request for unknown model: 'm' is not found") if self._refuses else ("", "")
                answer = ("c", record[1], ("A",) if code else kind, [] if code else record[3], None, code, text)
                lane.send(b"\x01" + msgspec.msgpack.encode([answer]))
