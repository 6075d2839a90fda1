"""A gateway for robots that speak ``openpi-client``'s protocol over WebSockets. It calls a daemon's models for them.

    python -m tensord_client.openpi --address 127.0.0.1:8900 --model policy        (pip install 'tensord-client[openpi]')

    robot ─ observation ─▶ RobotGateway ─ inputs, which a Policy makes ─▶ the daemon, over lanes or HTTP
    robot ◀─ metadata, actions, or a text with an error ── RobotGateway

Messages are msgpack. An array is {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [3]}. After an error the
connection stays open, because ``openpi-client`` connects only once. A message that is not of this protocol closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import json
import logging
import re
import reprlib
import ssl
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgpack
import numpy as np
from websockets import CloseCode, ConnectionClosed, Frame, Request, Response, ServerConnection, State, serve

from tensord_client import gateway
from tensord_client.asynchronous import AsyncClient, AsyncModel
from tensord_client.common.arrays import Array, datatype_of
from tensord_client.common.results import Answer
from tensord_client.common.tensors import Tensor, cast, flat
from tensord_client.errors import InvalidArgument, ServingError

#: A model, or one version of it, in the path of the address that a robot connects to; "/" is the model of --model.
_PATH = re.compile(r"/(?:([^/]+)(?:/versions/(\d{1,18}))?/?)?")
#: Bytes of answers to pings that may wait to be sent; how connections end when the gateway stops.
_PONGS, _STOPS = 1 << 16, (CloseCode.GOING_AWAY, "the gateway stops")
#: Texts in errors of sequences that have ended: the next observation begins another one.
_ENDS = "the START flag", "may not be run twice"
#: The program's flags besides those of all gateways.
FLAGS: gateway.Flags = {
    "--address": ("127.0.0.1:8900", "HOST:PORT where robots connect"),
    "--model": (None, "the model at /; each is at /MODEL and /MODEL/versions/N"),
    "--ignore": ([], "a pattern of keys that models do not get; may be repeated"),
    "--episodes": (False, "connections are sequences of models that keep state"),
    "--reset-key": ("reset", "the key of an observation that, if true, begins another sequence"),
    "--max-message-bytes": (32 << 20, "bytes of an observation"),
    "--max-unread-bytes": (256 << 20, "bytes of all observations that are still coming"),
    "--message-timeout": (10, "seconds for an observation to come, from its first byte to its last"),
    "--silence-timeout": (120, "seconds for a ping's answer, which openpi-client gives by itself"),
}
#: The most arrays of an observation, maps and lists in each other, and values of all maps and lists.
MAX_ARRAYS, MAX_DEPTH, MAX_VALUES = 256, 16, 1 << 16
#: The most values of one map or list, for which msgpack makes room before it reads them.
MAX_LENGTH = 1 << 12
#: The parameter in a model's configuration whose text, a JSON object, is told to robots as metadata.
METADATA = "openpi_metadata"
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|[SU][1-9]\d{0,8})")
#: Kinds of dtypes within which values are cast: bools, integers, floats (V is BF16) and texts.
_KINDS = "b", "iu", "fV", "SUO"


class Robot(ServerConnection):
    """A robot's WebSocket connection to the gateway.

    It is closed if too many bytes wait for the robot to read them, or if a message arrives too slowly. If too many bytes of all
    robots wait for the gateway to read them, the connection with the most of these bytes is closed.
    """

    gateway: RobotGateway
    policy: Policy
    #: The sequence of its observations; 0: the next one begins a sequence.
    sequence_id = 0
    #: The task that serves it, from an observation to its answer's leaving; bytes of its last answer.
    asking: asyncio.Task[Any] | None = None
    answered = 0
    #: Bytes that have come and were not read, and of these those of whole frames; what ends a message that takes too long.
    unread = _whole = 0
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.gateway.robots.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gateway.robots.discard(self)
        self.count()
        if self.asking is not None:
            self.asking.cancel()

    def process_event(self, event: Any) -> None:
        super().process_event(event)
        if isinstance(event, Frame) and event.opcode < 8:  # others are control frames
            self._whole += len(event.data)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.count()
        unread, most = self.gateway.unread, self.gateway.options.max_unread_bytes
        if unread > most:
            largest = max(self.gateway.robots, key=lambda robot: robot.unread)
            largest.drop(CloseCode.TRY_AGAIN_LATER, f"{unread} bytes of all robots are unread, {most} may be")
        waiting, most = self.transport.get_write_buffer_size(), self.answered + _PONGS
        if waiting > most:
            self.drop(CloseCode.POLICY_VIOLATION, f"{waiting} bytes wait for the robot to read them, {most} may")

    def count(self, read: int = 0) -> None:
        """Recomputes ``unread``, the number of bytes that have arrived from the robot and that the gateway has not read.

        Also starts or stops the time limit for a message that is arriving. Call it when bytes have arrived, when the gateway
        has read or answered a message, and when the connection has ended.
        ``read``: the size in bytes of the message that the gateway has just read, or 0 if it has read none.
        """
        self._whole -= read
        unread = self._whole + len(self.protocol.reader.buffer) if self.state is State.OPEN else 0
        self.gateway.unread += unread - self.unread
        self.unread = unread
        comes = unread > 0 and self.asking is None
        if comes and self._limit is None:
            self._limit = self.loop.call_later(self.gateway.options.message_timeout, self._end_message)
        elif not comes and self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _end_message(self) -> None:
        seconds = self.gateway.options.message_timeout
        self.drop(CloseCode.POLICY_VIOLATION, f"{self.unread} bytes of a message came in {seconds} s, and no end")

    def drop(self, code: int, reason: str) -> None:
        """Closes the robot's WebSocket connection with the status ``code`` and the text ``reason``. Does not wait for a reply."""
        if self.state is State.OPEN:
            self.protocol.fail(code, reason.encode()[:123].decode(errors="ignore"))  # as many bytes as a frame may have
            self.send_data()
        self.count()
        self.transport.close()
        self.loop.call_later(1.0, self.transport.abort)


class RobotGateway(gateway.Gateway):
    """Serves robots. It turns their observations into requests, and answers into actions."""

    def __init__(self, client: AsyncClient, options: Namespace) -> None:
        super().__init__(client, options, lambda key: b"Api-Key " + key)
        self.robots: set[Robot] = set()
        #: Bytes that have come from all robots and were not read yet.
        self.unread = 0
        self._stopping = False

    async def admit(self, robot: Robot, request: Request) -> Response | None:
        """Returns None if the robot may connect. Otherwise returns a refusal, or the answer to a request for ``/healthz``."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return robot.respond(200, "OK\n")
        if not self.is_known(request.headers.get_all("Authorization")):
            return robot.respond(401, "the robot's api_key is none of the gateway's\n")
        count, most = len(self.robots), self.options.max_connections
        if count > most:
            return robot.respond(503, f"{count} robots are connected, at most {most} may be\n")
        found = _PATH.fullmatch(path)
        name = found and (unquote(found[1] or "") or self.options.model)
        if not found or not name:
            return robot.respond(404, "a model is at /MODEL or /MODEL/versions/N, and at / if --model names it\n")
        try:
            robot.policy = await self.model((name, int(found[2] or 0)))
        except ServingError as error:
            status = {"NOT_FOUND": 404, "UNAVAILABLE": 503}.get(error.code, 500)
            return robot.respond(status, gateway.told(error) + "\n")
        return None

    async def make(self, name: str, version: int) -> Policy:
        model = await self.client.model(name, version, timeout=self.options.timeout)
        if model.has_sequences and not self.options.episodes:
            raise InvalidArgument(f"model '{name}' keeps state, for which the gateway needs --episodes")
        return Policy(model, version, await asyncio.to_thread(lambda: model.config), self.options.ignore)

    async def serve(self, robot: Robot) -> None:
        """Answers a robot's observations until the robot leaves or the gateway stops."""
        timing: dict[str, float] = {}
        try:
            await robot.send(msgpack.packb(robot.policy.metadata))
            while not self._stopping:
                message = await robot.recv(decode=False)
                robot.asking, begun = asyncio.current_task(), time.monotonic()
                robot.count(len(message))
                reply = await self._reply(robot, message, timing)
                robot.answered = len(reply)
                await robot.send(reply)
                robot.asking, timing = None, {"prev_total_ms": 1e3 * (time.monotonic() - begun)}
                robot.count()
            await robot.close(*_STOPS)
        except NotThisWire as error:
            robot.asking = None
            robot.drop(CloseCode.INVALID_DATA, str(error))
        except (ConnectionClosed, asyncio.CancelledError):
            pass  # it has left, perhaps while the model computed for it
        finally:
            await self._end_episode(robot)

    async def _reply(self, robot: Robot, message: bytes, timing: dict[str, float]) -> bytes | str:
        try:
            observation = read(message)
            begun = time.monotonic()
            with await self._ask(robot, observation) as answer:
                timing["infer_ms"] = 1e3 * (time.monotonic() - begun)
                return bytes(msgpack.packb({**robot.policy.actions(answer), "server_timing": timing}))
        except ServingError as error:
            return gateway.told(error)
        except NotThisWire:
            raise
        except Exception:
            logging.getLogger("tensord_client.openpi").exception("an observation has no answer")
            return "the gateway has failed with this observation; its log says why"

    async def _ask(self, robot: Robot, observation: dict[str, Any]) -> Answer:
        if self.options.episodes and observation.pop(self.options.reset_key, False):
            await self._end_episode(robot)
        try:
            inputs = robot.policy.inputs(observation)
        except InvalidArgument:
            # Perhaps the model was loaded anew, and takes something else now.
            robot.policy = await self.model(robot.policy.asked)
            inputs = robot.policy.inputs(observation)
        model, own = robot.policy.model, dict[str, Any]()
        if model.has_sequences:
            own["sequence_start"] = not robot.sequence_id
            own["sequence_id"] = robot.sequence_id = robot.sequence_id or model.sequence_id()
        try:
            return await gateway.ask(model, inputs, **own)
        except ServingError as error:
            if own.get("sequence_start") or any(text in error.message for text in _ENDS):
                await self._end_episode(robot)
            raise

    async def _end_episode(self, robot: Robot) -> None:
        sequence_id, robot.sequence_id = robot.sequence_id, 0
        if sequence_id:
            with contextlib.suppress(ServingError):
                await robot.policy.model.end_sequence(sequence_id)

    async def stop(self) -> None:
        """Closes all connections. Before, waits up to ``--stop-timeout`` seconds for the answers to robots' observations."""
        self._stopping = True
        ends = [robot.wait_closed() if robot.asking or robot.unread else robot.close(*_STOPS) for robot in self.robots]
        if ends:
            await asyncio.wait(map(asyncio.ensure_future, ends), timeout=self.options.stop_timeout)
        for robot in list(self.robots):
            robot.drop(*_STOPS)


class NotThisWire(Exception):
    """Raised if a message is no map in msgpack, so that its sender speaks another protocol."""


def read(message: bytes) -> dict[str, Any]:
    """Decodes an observation: a map of texts, numbers, lists, maps and arrays. The arrays are views of the message.

    Raises: NotThisWire: the message is no map in msgpack.  InvalidArgument: a limit is exceeded, or an array is malformed.
    """
    own = _Message()
    bounds = {"max_array_len": MAX_LENGTH, "max_map_len": MAX_LENGTH}
    try:
        found = msgpack.unpackb(message, object_hook=own.map, list_hook=own.counted, **bounds)
        if not isinstance(found, dict):
            raise ValueError(f"{type(found).__name__} came")
        gateway.bound("the observation has", _depth(found), "maps and lists in each other", MAX_DEPTH)
        return found
    except (msgpack.exceptions.StackError, RecursionError):
        raise InvalidArgument(f"the observation is over 500 maps and lists deep, at most {MAX_DEPTH} may be") from None
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        kind = InvalidArgument if "exceeds max_" in str(error) else NotThisWire
        raise kind(f"an observation is a map in msgpack: {error}") from None


def _depth(node: Any) -> int:
    if not isinstance(node, (dict, list)):
        return 0
    return 1 + max(map(_depth, node.values() if isinstance(node, dict) else node), default=0)


class _Message:
    arrays = values = 0

    def counted(self, found: Any, arrays: int = 0) -> Any:
        self.values = gateway.bound("the observation has", self.values + len(found), "values", MAX_VALUES)
        self.arrays = gateway.bound("the observation has", self.arrays + arrays, "arrays", MAX_ARRAYS)
        return found

    def map(self, found: Any) -> Any:
        self.counted(found, arrays=b"__ndarray__" in found)
        if b"__ndarray__" not in found and b"__npgeneric__" not in found:
            return found
        name, content = found.get(b"dtype"), found.get(b"data")
        if not isinstance(name, str) or _DTYPE.fullmatch(name) is None:
            raise InvalidArgument(f"{reprlib.repr(name)} came as a dtype, and bools, numbers or texts are expected")
        dtype = np.dtype(name)
        if b"__ndarray__" not in found:
            return cast("a scalar", content, datatype_of(dtype))
        made = gateway.array(f"an array {name}", dtype, found.get(b"shape"), content)
        self.counted(made.ravel() if dtype.kind in "SU" else ())
        return made


class Policy:
    """A model as robots use it. Converts observations to inputs, and answers to actions. Robots' arrays have no batch axis."""

    def __init__(self, model: AsyncModel, version: int, config: Mapping[str, Any], ignored: Sequence[str]) -> None:
        """Makes a policy of ``model``, with the metadata that each robot gets when it connects.

        ``version``: the version that was asked for, or 0 for the newest. ``config``: the model's configuration, or {} if there is
        none. ``ignored``: shell patterns for the names of observation values that are not sent to the model.
        Raises InvalidArgument if the parameter ``openpi_metadata`` in ``config`` is no JSON object.
        """
        self.model, self.asked, self._ignored = model, (model.name, version), ignored
        self._inputs, self._outputs = gateway.rows(model)
        optional = {each["name"] for each in config.get("input", ()) if each.get("optional")}
        self._required, self._takes = self._inputs.keys() - optional, f"the model takes {sorted(self._inputs)}"
        told: dict[str, Any] = {"model": model.name, "version": model.version}
        for key, tensors in (("inputs", self._inputs), ("outputs", self._outputs)):
            told[key] = {name: {"datatype": each.datatype, "shape": each.shape} for name, each in tensors.items()}
        text = config.get("parameters", {}).get(METADATA, {}).get("string_value") or "{}"
        try:
            #: The metadata that a robot gets when it connects.
            self.metadata = {**json.loads(text), "tensord": told}
        except (TypeError, ValueError):
            raise InvalidArgument(f"parameter '{METADATA}' of model '{model.name}' is no JSON object") from None

    def inputs(self, observation: Mapping[str, Any]) -> dict[str, Array]:
        """Converts a robot's observation, a map that may contain maps, to the model's inputs by name.

        The value ``observation["a"]["b"]`` is for the input "a/b" or "a.b". A value for no input is left out if its name
        matches a pattern in the constructor's ``ignored``. Raises InvalidArgument if the name matches no pattern,
        if a required input is missing, if two values are for one input, or if a value does not fit its input.
        """
        made: dict[str, Array] = {}
        for key, value in flat(observation, self._inputs).items():
            name = key if key in self._inputs else key.replace("/", ".")  # as trees of a JAX model are named
            if name in made:
                raise InvalidArgument(f"'{key}' is in the observation twice")
            if name in self._inputs:
                made[name] = self._fitting(key, value, self._inputs[name])
            elif not any(fnmatch.fnmatchcase(key, pattern) for pattern in self._ignored):
                raise InvalidArgument(f"the observation has {reprlib.repr(key)}, {self._takes}")
        if lacking := self._required - made.keys():
            raise InvalidArgument(f"the observation lacks {sorted(lacking)}, {self._takes}")
        return made

    def _fitting(self, key: str, value: Any, tensor: Tensor) -> Array:
        made: Array = value
        is_array = isinstance(value, np.ndarray)
        try:
            if not is_array or value.dtype != tensor.dtype or tensor.datatype == "BF16":
                kind = "V" if tensor.datatype == "BF16" else tensor.dtype.kind
                if is_array and not any(kind in kinds and value.dtype.kind in kinds for kinds in _KINDS):
                    raise InvalidArgument("bools, integers, floats and texts are not cast to each other")
                made = cast(key, value, tensor.datatype)
            if not made.shape:
                made = made.reshape((1,) * len(tensor.shape))
            if len(made.shape) != len(tensor.shape) or any(a not in (-1, b) for a, b in zip(tensor.shape, made.shape)):
                raise InvalidArgument("the shapes differ")
        except InvalidArgument as error:
            came = f"{value.dtype}{list(value.shape)}" if is_array else reprlib.repr(value)
            takes = f"the model takes {tensor.datatype}{list(tensor.shape)}"
            raise InvalidArgument(f"'{key}' is {came}, and {takes}: {error.message}") from None
        return made[np.newaxis] if self.model.max_batch_size else made

    def actions(self, answer: Mapping[str, Array]) -> dict[str, Any]:
        """Converts a model's answer to what a robot gets: arrays and texts by name."""
        told: dict[str, Any] = {}
        for name, value in answer.items():
            value = value[0, ...] if self.model.max_batch_size else value
            if value.dtype.kind == "O":
                with contextlib.suppress(UnicodeDecodeError):
                    value = np.array([each.decode() for each in value.ravel()], object).reshape(value.shape)
                told[name] = value.item() if value.shape in ((), (1,)) else value.tolist()
                continue
            value = gateway.for_client(value, self._outputs.get(name))
            dtype, shape = value.dtype.str, value.shape
            told[name] = {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": dtype, b"shape": shape}
        return told


@contextlib.asynccontextmanager
async def serving(client: AsyncClient, options: Namespace, listening: gateway.Listening) -> AsyncIterator[None]:
    """Serves robots over WebSockets on the socket ``listening`` until the ``async with`` block ends.

    Raises: OSError: the TLS certificate, TLS key or API key file cannot be used.  InvalidArgument: the API key file has no key.
    """
    served: Any = RobotGateway(client, options)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if options.certificate else None
    if tls:
        tls.load_cert_chain(options.certificate, options.key)
        # openpi-client writes while its other thread reads. OpenSSL may hold up the writer for ever while the reader takes a
        # ticket; robots connect once, and have no use for one.
        tls.num_tickets = 0
    robot = type("Robot", (Robot,), {"gateway": served})
    hooks: Any = {"process_request": served.admit, "create_connection": robot, "ssl": tls}
    bounds = {"max_size": options.max_message_bytes, "max_queue": 1, "ping_timeout": options.silence_timeout}
    logging.getLogger("websockets").setLevel(logging.CRITICAL)  # whoever connects could fill the log
    server = await serve(served.serve, sock=listening, compression=None, **hooks, **bounds)
    yield
    server.close(close_connections=False)
    await served.stop()
    await server.wait_closed()


if __name__ == "__main__":
    module = "tensord_client.openpi"
    gateway.main(module, gateway.options(module, __doc__, FLAGS), "robots", serving)
