"""A gateway for robots that speak ``openpi-client``'s protocol, over WebSockets: it asks the models of a daemon.

    python -m tensord_client.openpi --address 127.0.0.1:8900 --model policy        (pip install 'tensord-client[openpi]')

    robot ─ observation ─▶ Robot (a connection) ─▶ Gateway ─ tensors ─▶ the daemon, over lanes or HTTP
    robot ◀─ metadata, actions, or a text with an error ── Gateway

After an error the connection goes on, as ``openpi-client`` connects once. Only what is not this protocol is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hmac
import logging
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import DATA_OPCODES, CloseCode, Frame
from websockets.http11 import Request, Response
from websockets.protocol import State

from tensord_client.asynchronous import AsyncClient, connect_async
from tensord_client.common.submission import ends_sequence
from tensord_client.errors import InvalidArgument, NotFound, ResultsHeld, ServingError, Unavailable
from tensord_client.openpi_wire import NotThisWire, Policy, read, sentence, written

_log = logging.getLogger("tensord_client.openpi")
#: A model, or one version of it, in the path of the address that a robot connects to.
_PATH = re.compile(r"/([^/]+)(?:/versions/(\d{1,18}))?/?")
#: Seconds for which a look-up of a model holds; connections besides robots'; bytes that may wait to be sent besides an answer.
_FRESH, _UNDECIDED, _PONGS = 1.0, 64, 1 << 16
_STOPS = CloseCode.GOING_AWAY, "the gateway stops"


class Robot(ServerConnection):
    """The connection of one robot. It bounds the time of a message, and the bytes of messages that nobody has read."""

    gateway: Gateway
    #: The model and version of its path, and what is known of them.
    chosen: tuple[str, int]
    policy: Policy
    #: The sequence of its observations; 0: the next one begins a sequence.
    sequence_id = 0
    #: The task that serves it, from an observation to its answer's leaving; bytes of its last answer.
    asking: asyncio.Task[Any] | None = None
    answered = 0
    #: Bytes that have come and were not read, and of these those of whole frames; control frames are none.
    unread = 0
    _whole = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.gateway.robots.add(self)
        if len(self.gateway.robots) > self.gateway.options.max_connections + _UNDECIDED:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gateway.robots.discard(self)
        self._count()
        if self.asking is not None:
            self.asking.cancel()

    def process_event(self, event: Any) -> None:
        super().process_event(event)
        if isinstance(event, Frame) and event.opcode in DATA_OPCODES:
            self._whole += len(event.data)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._count()
        unread, most = self.gateway.unread, self.gateway.options.max_unread_bytes
        if unread > most:
            largest = max(self.gateway.robots, key=lambda robot: robot.unread)
            largest.drop(CloseCode.TRY_AGAIN_LATER, f"{unread} bytes of all robots are unread, {most} may be")
        # What leaves besides the answer are answers to pings.
        waiting, most = self.transport.get_write_buffer_size(), self.answered + _PONGS
        if waiting > most:
            self.drop(CloseCode.POLICY_VIOLATION, f"{waiting} bytes wait for the robot to read them, {most} may")

    def work(self, message: bytes | str | None) -> None:
        """Notes that a message was read, and that this task answers it; None: that it was answered."""
        self._whole -= len(message or b"")
        self.asking = None if message is None else asyncio.current_task()
        self._count()

    def _count(self) -> None:
        unread = self._whole + len(self.protocol.reader.buffer) if self.state is State.OPEN else 0
        self.gateway.unread += unread - self.unread
        self.unread = unread
        # While an observation is under way the next one waits, whole or not.
        waits = unread and not self.asking
        if waits and self._timer is None:
            self._timer = self.loop.call_later(self.gateway.options.message_timeout, self._expire)
        elif self._timer is not None and not waits:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        came, seconds = self.unread, self.gateway.options.message_timeout
        self.drop(CloseCode.POLICY_VIOLATION, f"{came} bytes of a message came in {seconds} s, and no end")

    def drop(self, code: int, reason: str) -> None:
        """Closes the connection without waiting for the robot."""
        if self.state is State.OPEN:
            self.protocol.fail(code, reason)
            self.send_data()
        self._count()
        self.transport.close()
        self.loop.call_later(1.0, self.transport.abort)


class Gateway:
    """Serves robots: finds their models, and turns their observations into requests and answers into actions."""

    def __init__(self, client: AsyncClient, options: argparse.Namespace, keys: Sequence[bytes]) -> None:
        """Serves nobody yet. ``keys``: a robot has to tell one of them; empty: it has to tell none."""
        self.options = options
        self.robots: set[Robot] = set()
        #: Bytes that have come from all robots and were not read yet.
        self.unread = 0
        self._client = client
        self._keys = keys
        self._stopping = False
        self._looking_up = asyncio.Lock()
        #: Policies, and when they were looked up, by model and version.
        self._known: dict[tuple[str, int], tuple[float, Policy]] = {}

    async def admit(self, robot: Robot, request: Request) -> Response | None:
        """Decides about a robot that connects. Returns a refusal, the answer to ``/healthz``, or None: it may."""
        path, told = request.path.partition("?")[0], request.headers.get_all("Authorization")
        given = told[0].encode(errors="replace") if len(told) == 1 else b""
        if path == "/healthz":
            return robot.respond(200, "OK\n")
        # All keys are compared, each in constant time.
        if self._keys and not sum([hmac.compare_digest(b"Api-Key " + key, given) for key in self._keys]):
            return robot.respond(401, "the robot's api_key is none of the gateway's\n")
        count, most = len(self.robots), self.options.max_connections
        if count > most:
            return robot.respond(503, f"{count} robots are connected, at most {most} may be\n")
        found = _PATH.fullmatch(path)
        name = unquote(found[1]) if found else self.options.model if path == "/" else ""
        if not name:
            return robot.respond(404, "a model is at /MODEL or /MODEL/versions/N, and at / if --model names it\n")
        try:
            robot.chosen = name, int((found and found[2]) or 0)
            robot.policy = await self._policy(*robot.chosen)
            if robot.policy.model.has_sequences and not self.options.episodes:
                raise InvalidArgument(f"model '{name}' keeps state, for which the gateway needs --episodes")
        except ServingError as error:
            status = {NotFound: 404, Unavailable: 503}.get(type(error), 500)
            return robot.respond(status, f"{sentence(error)}\n")
        return None

    async def _policy(self, name: str, version: int) -> Policy:
        """Looks up a model, unless that was done a moment ago. Raises ServingError: it is not served."""
        async with self._looking_up:
            at, policy = self._known.get((name, version), (0.0, None))
            if policy is None or time.monotonic() - at > _FRESH:
                model = await self._client.model(name, version, timeout=self.options.timeout)
                policy = Policy(model, await asyncio.to_thread(lambda: model.config), self.options.ignore)
                self._known[name, version] = time.monotonic(), policy
            return policy

    async def serve(self, robot: Robot) -> None:
        """Talks with a robot until it leaves, or until the gateway stops and the robot has its answer."""
        timing: dict[str, float] = {}
        try:
            await robot.send(written(robot.policy.metadata))
            while not self._stopping:
                message = await robot.recv()
                robot.work(message)
                begun = time.monotonic()
                reply = await self._reply(robot, message, timing)
                robot.answered = len(reply)
                await robot.send(reply)
                robot.work(None)
                timing = {"prev_total_ms": 1e3 * (time.monotonic() - begun)}
            await robot.close(*_STOPS)
        except NotThisWire as error:
            robot.work(None)
            # A reason has 123 bytes at most.
            await robot.close(CloseCode.INVALID_DATA, str(error).encode()[:123].decode(errors="ignore"))
        except (ConnectionClosed, asyncio.CancelledError):
            pass  # it has left, perhaps while the model computed for it
        finally:
            await self._end_episode(robot)

    async def _reply(self, robot: Robot, message: bytes | str, timing: dict[str, float]) -> bytes | str:
        """Returns a robot's actions for a message, or a text with an error. ``timing``: what they say besides ``infer_ms``."""
        try:
            if isinstance(message, str):
                raise NotThisWire("a text came, and an observation is binary")
            observation = read(message)
            begun = time.monotonic()
            actions = await self._infer(robot, observation)
            infer_ms = 1e3 * (time.monotonic() - begun)
            return written({**actions, "server_timing": {"infer_ms": infer_ms, **timing}})
        except ServingError as error:
            return sentence(error)
        except NotThisWire:
            raise
        except Exception:
            _log.exception("an observation has no answer")
            return "the gateway has failed with this observation; its log says why"

    async def _infer(self, robot: Robot, observation: dict[str, Any]) -> dict[str, Any]:
        if self.options.episodes and observation.pop(self.options.reset_key, False):
            await self._end_episode(robot)
        try:
            inputs = robot.policy.inputs(observation)
        except InvalidArgument:
            # Perhaps the model was loaded anew, and takes something else now.
            with contextlib.suppress(ServingError):
                robot.policy = await self._policy(*robot.chosen)
            inputs = robot.policy.inputs(observation)
        own: dict[str, Any] = {}
        if robot.policy.model.has_sequences:
            own["sequence_start"] = not robot.sequence_id
            own["sequence_id"] = robot.sequence_id = robot.sequence_id or robot.policy.model.sequence_id()
        while True:
            try:
                with await robot.policy.model(inputs, **own) as answer:
                    return robot.policy.actions(answer)
            except ResultsHeld:
                # Answers to other robots have come, and hold the worker's memory until their tasks have run.
                await asyncio.sleep(0)
            except ServingError as error:
                if own.get("sequence_start") or ends_sequence(error):  # the robot is told, and begins anew
                    await self._end_episode(robot)
                raise

    async def _end_episode(self, robot: Robot) -> None:
        sequence_id, robot.sequence_id = robot.sequence_id, 0
        if sequence_id:
            with contextlib.suppress(ServingError):
                await robot.policy.model.end_sequence(sequence_id)

    async def stop(self) -> None:
        """Ends all connections: with the answer where an observation is under way or comes, and after a time in any case."""
        self._stopping = True
        ends = [robot.wait_closed() if robot.asking or robot.unread else robot.close(*_STOPS) for robot in self.robots]
        if ends:
            await asyncio.wait(map(asyncio.ensure_future, ends), timeout=self.options.stop_timeout)
        for robot in list(self.robots):
            robot.drop(*_STOPS)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host:  # which would be all of them
        raise ValueError
    return host.strip("[]"), int(port)


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1 << 40:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {1 << 40}")
    return int(number) if number.is_integer() else number


#: Bounds and times, with their defaults.
_NUMBERS = {
    "--max-connections": (256, "robots at the same time"),
    "--max-message-bytes": (32 << 20, "bytes of an observation"),
    "--max-unread-bytes": (256 << 20, "bytes of all observations that are still coming"),
    "--message-timeout": (10, "seconds for an observation to come, from its first byte to its last"),
    "--timeout": (60, "seconds for an answer of the model"),
    "--patience": (30, "seconds of these for a daemon that is being replaced"),
    "--wait": (60, "seconds for the daemon when the gateway starts"),
    "--silence-timeout": (120, "seconds for a ping's answer, which openpi-client gives by itself"),
    "--stop-timeout": (30, "seconds for observations under way when the gateway stops"),
}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the program's arguments; None: those of this process."""
    parser = argparse.ArgumentParser("python -m tensord_client.openpi", description=str(__doc__).partition("\n")[0])
    add = functools.partial(parser.add_argument, metavar="X")
    add("--address", type=_address, default="127.0.0.1:8900", help="HOST:PORT where robots connect (127.0.0.1:8900)")
    add("--server", help="the daemon's folder, socket or HTTP's HOST:PORT ($TENSORD, or the daemon of this host)")
    add("--model", help="the model at /; each is at /MODEL and /MODEL/versions/N")
    add("--ignore", action="append", default=[], help="a pattern of keys that models do not get; may be repeated")
    parser.add_argument("--episodes", action="store_true", help="connections are sequences of models that keep state")
    add("--reset-key", default="reset", help="the key of an observation that, if true, begins another sequence (reset)")
    add("--api-key-file", type=Path, help="a file with a key a line, one of which a robot has to tell")
    add("--certificate", type=Path, help="a certificate chain in PEM: robots connect to wss://")
    add("--key", type=Path, help="the certificate's key in PEM")
    for name, (default, meaning) in _NUMBERS.items():
        add(name, type=_positive, default=default, help=f"{meaning} ({default})")
    return parser.parse_args(arguments)


def _notify(state: bytes) -> None:
    """Tells systemd about the service, if systemd has started it."""
    if where := os.environ.get("NOTIFY_SOCKET", ""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state, where.replace("@", "\0", 1))


async def run(options: argparse.Namespace) -> None:
    """Serves robots until SIGTERM or SIGINT. Raises: OSError: a file or the address cannot be used.  ServingError: no daemon."""
    keys = options.api_key_file.read_bytes().split() if options.api_key_file else []
    if options.api_key_file and not keys:
        raise InvalidArgument("the file of --api-key-file has no key")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if options.certificate else None
    if tls:
        tls.load_cert_chain(options.certificate, options.key)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await connect_async(options.server, wait=options.wait, patience=options.patience) as client:
        gateway = Gateway(client, options, keys)
        hooks: dict[str, Any] = {
            "process_request": gateway.admit,
            "max_queue": 1,
            "ping_timeout": options.silence_timeout,
        }
        hooks["create_connection"] = type("Robot", (Robot,), {"gateway": gateway})
        serving: Any = gateway.serve
        size = options.max_message_bytes
        server = await serve(serving, *options.address, compression=None, ssl=tls, max_size=size, **hooks)
        where = ", ".join("{}:{}".format(*sock.getsockname()[:2]) for sock in server.sockets)
        _log.info("robots are served on %s", where)
        _notify(b"READY=1")
        await stop.wait()
        _notify(b"STOPPING=1")
        server.close(close_connections=False)
        await gateway.stop()
        await server.wait_closed()


def main() -> None:
    """Runs the gateway as a program."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    # Whoever connects could fill the log.
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    try:
        asyncio.run(run(options()))
    except (ServingError, OSError) as error:
        sys.exit(f"tensord_client.openpi: {error}")


if __name__ == "__main__":
    main()
