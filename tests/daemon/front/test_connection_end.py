"""The end of a connection, as another process sees it."""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys

import pytest

from tensord.daemon.front.peer import ConnectionEnd
from tensord.shm.errors import Unavailable

CHILD = """
import os, sys
from tensord.daemon.front.peer import ConnectionEnd
connection = ConnectionEnd()
with connection.descriptor() as end:
    os.dup2(end, int(sys.argv[1]))
print("made", flush=True)
sys.stdin.read()
"""


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_readable_from_the_end_on() -> None:
    before = set(os.listdir("/proc/self/fd"))
    connection = ConnectionEnd()
    assert set(os.listdir("/proc/self/fd")) <= before
    with connection.descriptor() as first, connection.descriptor() as second:
        kept = os.dup(first)
        assert not os.get_inheritable(first)
        assert not is_readable(first)
        assert "to come" in repr(connection)
        connection.close()
        assert is_readable(first)
        assert is_readable(second)
    assert is_readable(kept)
    with connection.descriptor() as late:
        assert is_readable(late)
    connection.close()
    os.close(kept)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_the_process_that_serves_it_dies() -> None:
    """Nobody has to say anything: the kernel closes its half."""
    # The child's reading half cannot come back without a socket: it is reached through /proc while the child lives.
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "100"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "made\n"
    end = os.open(f"/proc/{child.pid}/fd/100", os.O_RDONLY)
    assert not is_readable(end)
    child.kill()
    child.wait()
    assert is_readable(end)
    os.close(end)
    child.stdin.close()
    child.stdout.close()


def test_no_descriptors_are_left() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    connection = ConnectionEnd()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(Unavailable, match="cannot be watched now"), connection.descriptor():
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with connection.descriptor() as end:
        assert not is_readable(end)
    connection.close()
