"""Attacks by a client on memory: registered regions that change or are too many, and pushed parameters that are none."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.attackers.target import Target
from bench.helper import object_name

_SIZE = 1 << 20
_FOLDER = Path(__file__).parent / "models" / "pushed" / "1"


def cut_while_registered(target: Target) -> None:
    """Registers a file while a second thread truncates and extends it, so that it shrinks in the middle of a registration."""
    stop = threading.Event()

    def change(path: Path) -> None:
        while not stop.is_set():
            os.truncate(path, 100)
            os.truncate(path, _SIZE)

    with _object() as path, target.posting() as post:
        thread = threading.Thread(target=change, args=(path,))
        thread.start()
        try:
            while target.going_on():
                post(*_registration(path, _SIZE))
                post(f"/v2/systemsharedmemory/region/{path.name}/unregister", "{}")
        finally:
            stop.set()
            thread.join()


def many_regions(target: Target) -> None:
    """Registers regions, each with its own shared memory file, until the server refuses more, and unregisters them."""
    with contextlib.ExitStack() as stack:
        post = stack.enter_context(target.posting())
        names = []
        while target.going_on() and len(names) < 6000:
            path = stack.enter_context(_object(4096))
            post(*_registration(path, 4096))
            names.append(path.name)
        for name in names:
            post(f"/v2/systemsharedmemory/region/{name}/unregister", "{}")


def fifos(target: Target) -> None:
    """Pushes files that are FIFOs to which nobody writes, one after the other of each kind."""
    with contextlib.ExitStack() as stack:
        push = stack.enter_context(_pushing(target))
        names = []
        for ending in (".safetensors", ".npz", ".msgpack"):
            path = _FOLDER / f"{object_name()}{ending}"
            os.mkfifo(path)
            stack.callback(path.unlink)
            names.append(path.name)
        for name in itertools.cycle(names):
            if not target.going_on():
                break
            push(json.dumps({"file": name}).encode(), b"")


def huge_headers(target: Target) -> None:
    """Pushes headers of 30 MB: a million and a half of leaves, or of entries of metadata."""
    many = ",".join(f'"{number:x}":"abcdef"' for number in range(1_500_000))
    texts = (f"{{{many}}}".encode(), f'{{"__metadata__":{{{many}}}}}'.encode())
    with _pushing(target) as push:
        for text in itertools.cycle(texts):
            if not target.going_on():
                break
            push(b"{}", len(text).to_bytes(8, "little") + text)


@contextlib.contextmanager
def _pushing(target: Target) -> Iterator[Callable[[bytes, bytes], None]]:
    """Yields a function that pushes JSON and parameters on one kept connection and counts the status of each answer."""
    with target.posting() as post:
        yield lambda fields, content: post(
            "/v2/models/pushed/parameters/main", fields + content, {"Inference-Header-Content-Length": str(len(fields))}
        )


def _registration(path: Path, byte_size: int) -> tuple[str, str]:
    """Returns the path and the body of the request that registers a file as a region of its name."""
    said = {"key": f"/{path.name}", "offset": 0, "byte_size": byte_size}
    return f"/v2/systemsharedmemory/region/{path.name}/register", json.dumps(said)


@contextlib.contextmanager
def _object(byte_size: int = _SIZE) -> Iterator[Path]:
    path = Path("/dev/shm", object_name())
    try:
        path.touch(0o600)
        os.truncate(path, byte_size)
        yield path
    finally:
        path.unlink(missing_ok=True)


ATTACKS: dict[str, Callable[[Target], None]] = {
    "regions-cut-while-registered": cut_while_registered,
    "regions-many": many_regions,
    "pushes-of-fifos": fifos,
    "pushes-of-huge-headers": huge_headers,
}
