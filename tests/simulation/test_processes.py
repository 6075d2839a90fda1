"""What the other processes of a simulation see of one that has died."""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from tensord.config.options import Options
from tensord.shm.channel import pair
from tests.simulation.daemon import Daemon
from tests.simulation.processes import WorkerProcess
from tests.simulation.scheduler import Scheduler
from tests.simulation.threads import ClientProcess


@contextlib.contextmanager
def worker(sock: socket.socket) -> Iterator[None]:
    """Makes a worker with this socket to its supervisor, which is killed when the block has run."""
    process = WorkerProcess(Daemon(Scheduler(1), Options(), ()), "worker", sock)
    yield
    process.end(-signal.SIGKILL)
    # As after a death, and before it is buried, which would close the socket in any case.
    os.close(process.dead_fd)


@contextlib.contextmanager
def program(sock: socket.socket) -> Iterator[None]:
    """Makes a program with this socket to the daemon, which is killed when the block has run."""
    process = ClientProcess(Scheduler(1), "program", "")
    process.sockets_opened.add(sock)
    yield
    process.end()


@pytest.mark.parametrize("living", [worker, program])
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_lane_ends_with_a_process_that_has_not_received_it(living, is_alone: bool) -> None:
    """
    1. Somebody sends a process its end of a lane. 2. He has not read what it has sent, and ends before it, or lives on.
    3. The process is killed before it has received the lane.
    Result: the lane's other end is told that it has ended. So is, where he lives, the end that had sent it.
    """
    sender, own = pair()
    lane, given = pair()
    with sender, own, lane:
        with living(own):
            own.send(b"a record")
            with given:
                sender.sendmsg(
                    [b"a lane"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [given.fileno()]))]
                )
            if is_alone:
                sender.close()
        lane.setblocking(False)
        assert lane.recv(1) == b""
        if not is_alone:
            with pytest.raises(ConnectionResetError):
                sender.recv(64)
            assert [sender.recv(64), sender.recv(64)] == [b"a record", b""]
