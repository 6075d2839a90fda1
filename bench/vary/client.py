"""Compiles the client in C (client.c), and gives it a pool of requests whose answers were checked.

    record: each request once ─▶ answers.py checks the answers ─▶ measure: each answer has to be the recorded one, byte for byte

A server answers the same request with the same bytes, but two servers with different ones; so an answer that Python has found
right once can be compared in C within a few nanoseconds.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.vary.answers import WrongAnswer, check, check_blocks
from bench.vary.pools import Pool

_SOURCES = [Path(__file__).with_name(name) for name in ("client.c", "http.c", "grpc.c")]
#: Connections while answers are recorded: a server computes some of them together then, as later.
_RECORDING = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one measurement."""

    answers: int
    #: With those before the clock started and after it stopped.
    total: int
    #: That never came.
    lost: int
    seconds: float
    p50_us: float
    p99_us: float
    worst_us: float
    #: The client's own processor time for each answer.
    client_us: float
    #: The server's, of all its processes; None: they are not known.
    server_us: float | None = None

    @property
    def rate(self) -> float:
        """Returns answers a second."""
        return self.answers / self.seconds


class Client:
    """The compiled client, and a folder for its files."""

    def __init__(self, folder: Path) -> None:
        """Compiles the client into the folder. Raises SystemExit: there is no C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            raise SystemExit("the client is written in C: there is no compiler (cc)")
        self._folder = folder
        self._program = folder / "client"
        command = [compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", self._program, *_SOURCES, "-lm"]
        subprocess.run(command, check=True)

    def record(self, address: str, pool: Pool) -> Path:
        """Sends each request once and checks the answers; returns a file with the pool and this server's answers.

        Raises WrongAnswer: an answer is not the right one; RuntimeError: the client could not go on.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            empty, recorded = Path(folder, "pool"), Path(folder, "recorded")
            empty.write_bytes(_file(pool, [], [b""] * len(pool.exchanges)))
            self._run(pool.protocol, address, _RECORDING, empty, f"--record={recorded}")
            blocks, answers = _recorded(recorded.read_bytes())
        check_blocks(blocks)
        for number, (exchange, answer) in enumerate(zip(pool.exchanges, answers, strict=True)):
            try:
                check(pool.protocol, exchange.asked, answer)
            except WrongAnswer as error:
                raise WrongAnswer(f"request {number} to {address}: {error}") from None
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix="pool-", delete=False) as file:
            file.write(_file(pool, blocks, answers))
        return Path(file.name)

    def measure(
        self, protocol: str, address: str, pool: Path, connections: int, seconds: float, renews: bool = False
    ) -> Figures:
        """Runs a closed loop and returns its figures. ``renews``: each request has a connection of its own.

        Raises WrongAnswer: an answer differs from the recorded one; RuntimeError: the client could not go on.
        """
        words = [f"--seconds={seconds}", *(["--new"] if renews else [])]
        return Figures(**json.loads(self._run(protocol, address, connections, pool, *words)))

    def _run(self, protocol: str, address: str, connections: int, pool: Path, *words: str) -> str:
        command = [str(self._program), f"--protocol={protocol}", f"--address={address}"]
        command += [f"--connections={connections}", f"--pool={pool}", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            kind = WrongAnswer if "wrong answer" in done.stderr else RuntimeError
            raise kind(f"{address}: {done.stderr.strip() or f'the client ended with {done.returncode}'}")
        return done.stdout


@contextlib.contextmanager
def compiled() -> Iterator[Client]:
    """Compiles the client; its files are removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix="tensord-bench-") as folder:
        yield Client(Path(folder))


def _piece(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


def _file(pool: Pool, blocks: list[bytes], answers: list[bytes]) -> bytes:
    """Packs a pool with its header blocks and answers into the file that client.c reads."""
    pieces = [struct.pack("<I", len(pool.exchanges)), _piece(pool.opening), struct.pack("<I", len(blocks))]
    pieces += map(_piece, blocks)
    for exchange, answer in zip(pool.exchanges, answers, strict=True):
        asked = exchange.asked
        rounded = sum(values.nbytes for values in asked.outputs.values()) if any(asked.rounded) and answer else 0
        numbers = struct.pack("<IffI", rounded, *asked.rounded, exchange.goes_on)
        pieces += (_piece(exchange.request), _piece(answer), numbers)
    return b"".join(pieces)


def _recorded(content: bytes) -> tuple[list[bytes], list[bytes]]:
    """Unpacks the header blocks and the answers from the file that client.c writes."""
    pieces, (count,), at = [], struct.unpack_from("<I", content), 4
    while at < len(content):
        (size,) = struct.unpack_from("<I", content, at)
        pieces.append(content[at + 4 : at + 4 + size])
        at += 4 + size
    return pieces[:count], pieces[count:]
