"""Runs a client that does everything an owner of shared memory can do to harm the daemon, as a process of its own.

``python -m tests.faults.attacker URL PREFIX FILL KEY...``. It prints one JSON object at its end: every error message that it got,
by trick. Its own keys begin with PREFIX; KEY are other users'. With FILL it also fills /dev/shm, which should then be its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import PATIENCE

SIZE = 1 << 20
#: More than any quota of the daemon under attack.
MANY = 500
_ROUNDS = 40
_PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, linux/falloc.h
_FOLDER = Path("/dev/shm")


class Attacker:
    """A client that attacks. ``messages``: trick -> the error messages that it got."""

    def __init__(self, url: str, prefix: str) -> None:
        self.client = httpclient.InferenceServerClient(url, connection_timeout=PATIENCE, network_timeout=PATIENCE)
        self.prefix = prefix
        self.messages: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def refused(self, trick: str) -> Iterator[None]:
        """Notes the daemon's error message if the block's call fails."""
        try:
            yield
        except InferenceServerException as error:
            self.messages.setdefault(trick, []).append(error.message())

    def rounds(self, trick: str) -> Iterator[int]:
        """Yields numbers: forty, and more until the trick has been refused once."""
        number = 0
        while number < _ROUNDS or trick not in self.messages:
            yield number
            number += 1

    def key(self, name: str) -> str:
        return f"/{self.prefix}-{name}"

    def path(self, name: str) -> Path:
        return _FOLDER / f"{self.prefix}-{name}"

    def register(self, trick: str, name: str, key: str, byte_size: int, offset: int = 0) -> None:
        with self.refused(trick):
            self.client.register_system_shared_memory(f"{self.prefix}-{name}", key, byte_size, offset)

    def unregister(self, name: str) -> None:
        self.client.unregister_system_shared_memory(f"{self.prefix}-{name}")

    def infer(
        self,
        trick: str,
        model: str,
        datatype: str,
        count: int,
        given: tuple[str, int, int],
        wanted: tuple[str, int, int],
    ) -> None:
        """Sends an inference request with regions. Input and output are (region, byte size, offset)."""
        tensor, output = httpclient.InferInput("x", [count], datatype), httpclient.InferRequestedOutput("y")
        tensor.set_shared_memory(f"{self.prefix}-{given[0]}", given[1], offset=given[2])
        output.set_shared_memory(f"{self.prefix}-{wanted[0]}", wanted[1], offset=wanted[2])
        with self.refused(trick):
            self.client.infer(model, [tensor], outputs=[output])

    # ---------------------------------------------------------------------------------------------------- tricks

    def torment(self) -> None:
        """Truncates, punches, rewrites, unlinks and makes a region's file again while requests read and write it."""
        stop = threading.Event()

        def change() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            while not stop.is_set():
                fd = os.open(self.path("object"), os.O_RDWR | os.O_CREAT, 0o600)
                os.ftruncate(fd, SIZE)
                os.pwrite(fd, os.urandom(4096), 0)
                libc.fallocate(fd, _PUNCH, ctypes.c_long(0), ctypes.c_long(SIZE // 2))
                os.ftruncate(fd, 100)
                os.close(fd)
                self.path("object").unlink(missing_ok=True)

        self.path("object").write_bytes(bytes(SIZE))
        thread = threading.Thread(target=change)
        self.register("truncated", "object", self.key("object"), SIZE)
        thread.start()
        half = SIZE // 2
        for _ in self.rounds("truncated"):
            self.infer("truncated", "echo_fp32", "FP32", half // 4, ("object", half, 0), ("object", half, half))
            self.unregister("object")
            self.register("truncated", "object", self.key("object"), SIZE)
        stop.set()
        thread.join()
        self.unregister("object")
        self.path("object").unlink(missing_ok=True)

    def rewrite(self) -> None:
        """Changes the lengths of BYTES elements, and truth values, while they are read."""
        good = b"".join(struct.pack("<I", 4) + b"abcd" for _ in range(512))
        self.path("bytes").write_bytes(good + bytes(SIZE - len(good)))
        self.register("rewritten", "bytes", self.key("bytes"), SIZE)
        stop = threading.Event()

        def change() -> None:
            fd = os.open(self.path("bytes"), os.O_RDWR)
            while not stop.is_set():
                for length in (4, 0xFFFFFFFF, 0, 1 << 31, 5):
                    os.pwrite(fd, struct.pack("<I", length), 8 * 100)
            os.close(fd)

        thread = threading.Thread(target=change)
        thread.start()
        for _ in self.rounds("rewritten"):
            self.infer(
                "rewritten", "echo_bytes", "BYTES", 512, ("bytes", len(good), 0), ("bytes", SIZE // 2, SIZE // 2)
            )
            self.infer(
                "rewritten", "echo_bool", "BOOL", len(good), ("bytes", len(good), 0), ("bytes", SIZE // 2, SIZE // 2)
            )
        stop.set()
        thread.join()
        self.unregister("bytes")
        self.path("bytes").unlink()

    def names(self, foreign: list[str]) -> None:
        """Registers keys of other users' memory, and keys that are no memory at all."""
        os.mkfifo(self.path("fifo"))
        self.path("folder").mkdir()
        self.path("link").symlink_to("/etc/passwd")
        keys = [
            "/../etc/passwd",
            "/sem.victim",
            "/proc/self/mem",
            "/memfd:tensord",
            "/dev/mem",
            "/",
            "",
            "/a/../b",
            "/nobody-has",
        ]
        for key in [*keys, *foreign, *map(self.key, ("fifo", "folder", "link"))]:
            self.register(f"name {key}", "bad", key, 64)
        self.path("fifo").unlink()
        self.path("folder").rmdir()
        self.path("link").unlink()

    def ranges(self) -> None:
        """Registers and uses negative, huge and overlapping offsets and sizes."""
        self.path("range").write_bytes(bytes(SIZE))
        for byte_size, offset in [
            (64, -4096),
            (-64, 0),
            (64, 2**62),
            (SIZE, 4096),
            (2**63, 0),
            (2**63 - 1, 1),
            (2**64, 0),
            (64, 1),
        ]:
            self.register(f"range {offset}+{byte_size}", "bad", self.key("range"), byte_size, offset)
            self.unregister("bad")
        self.register("range", "range", self.key("range"), SIZE)
        for byte_size, offset in [
            (64, -64),
            (-64, 0),
            (64, 2**62),
            (64, SIZE),
            (64, SIZE - 32),
            (2**64 - 64, 128),
            (64, 2**64 - 64),
        ]:
            self.infer(
                f"slice {offset}+{byte_size}", "echo_fp32", "FP32", 16, ("range", byte_size, offset), ("range", 64, 0)
            )
            self.infer(
                f"slice {offset}+{byte_size} out",
                "echo_fp32",
                "FP32",
                16,
                ("range", 64, 0),
                ("range", byte_size, offset),
            )
        self.unregister("range")
        self.path("range").unlink()

    def fill(self) -> None:
        """Names a sparse region for an output while /dev/shm has no page left for it."""
        self.path("sparse").touch()
        os.truncate(self.path("sparse"), 1 << 30)
        self.register("sparse", "sparse", self.key("sparse"), 1 << 30)
        with contextlib.suppress(OSError), self.path("filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        for _ in range(3):
            self.infer("full", "echo_fp32", "FP32", SIZE // 4, ("sparse", SIZE, 0), ("sparse", SIZE, 512 << 20))
        self.path("filler").unlink()
        self.unregister("sparse")
        self.path("sparse").unlink()

    def flood(self) -> None:
        """Registers more regions than any quota allows."""
        self.path("flood").write_bytes(bytes(4096))
        for number in range(MANY):
            self.register("flood", f"flood-{number}", self.key("flood"), 4096)
        # Whatever quota there is, more than that were refused.
        for entry in self.client.get_system_shared_memory_status():
            if entry["name"].startswith(f"{self.prefix}-flood-"):
                self.client.unregister_system_shared_memory(entry["name"])
        self.path("flood").unlink()


def main(url: str, prefix: str, fill: bool, foreign: list[str]) -> dict[str, Any]:
    attacker = Attacker(url, prefix)
    attacker.torment()
    attacker.rewrite()
    attacker.names(foreign)
    attacker.ranges()
    if fill:
        attacker.fill()
    attacker.flood()
    attacker.client.close()
    return attacker.messages


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3] == "fill", sys.argv[4:])))
