"""Sends requests to a server over HTTP: the Open Inference Protocol with binary tensors, over a unix socket or TCP.

The body of a request or an answer is a JSON object, and then the bytes of tensors in the order in which the JSON names them.
The header Inference-Header-Content-Length has the JSON's size in bytes. A stream of responses lacks this header: each
response begins with the JSON's size (u32) and the total size of the response's tensors (u64), both little-endian.

Source: Open Inference Protocol, REST; Triton docs/protocol/extension_binary_data.md; tensord docs/protocol.md.
"""

from __future__ import annotations

import json
import reprlib
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import numpy as np

from tensord_client.common.arrays import datatype_of, decode, dtype_of
from tensord_client.common.call import MAX_WAITING, Call
from tensord_client.common.connection import Connection
from tensord_client.common.forks import forgotten_by_children
from tensord_client.common.results import Answer, Array, Description, Timing, check_place, written
from tensord_client.common.scheduling import PARAMETERS, Kind
from tensord_client.common.tensors import content
from tensord_client.errors import (
    CLOSED,
    Internal,
    InvalidArgument,
    ServingError,
    Unavailable,
    from_code,
    from_status,
)
from tensord_client.http_channel import Address, Buffer, HttpResponse
from tensord_client.http_request import HttpExchange, HttpRequest, Pool, Unreached, Waiter
from tensord_client.parameters import ModelParameters

if TYPE_CHECKING:
    from tensord_client.device_memory import DeviceMemory

_PART = struct.Struct("<IQ")
_BINARY = b"application/octet-stream"
#: Operations on parameter sets: the method, and what follows the set's path.
_OPERATIONS = {"parameters": ("GET", ""), "push": ("POST", ""), "drop": ("DELETE", ""), "revert": ("POST", "/revert")}
#: The most kinds of requests whose head and JSON are cached.
_REMEMBERED = 256
#: Up to so many bytes of tensors are copied behind the head, to be sent in one piece.
_SMALL = 8192
#: Seconds to wait for a server's first answer, when connecting.
_LONGEST = 10.0


class HttpConnection(Connection):
    """A connection to a server over HTTP. Its requests share a number of keep-alive connections.

    Thread-safe. After a fork the child process connects anew.
    """

    def __init__(
        self,
        address: Address,
        limit: int = 64,
        patience: float = 30.0,
        max_waiting: int = MAX_WAITING,
        fields: bytes = b"",
    ) -> None:
        """Prepares for requests to the server at ``address``, but sends nothing.

        Args:
          limit: the most HTTP connections that are open at a time. Further requests wait until a connection is free.
          patience: the seconds that a request waits for a server that cannot be reached or is stopping.
          max_waiting: the most requests that wait for a connection. A further request is refused with Unavailable.
          fields: additional header lines for every request, each with CRLF at its end.
        """
        self._fields = b" HTTP/1.1\r\nHost: " + address.authority.encode() + b"\r\n" + fields
        self.address = address
        self._limit = limit
        self._max_waiting = max_waiting
        self._patience = patience
        self._heads: dict[Any, tuple[bytes, int]] = {}
        #: Datatypes of the inputs, by name, of each model and version that was opened.
        self._declared: dict[tuple[str, int], dict[str, str]] = {}
        #: Arrays on GPUs; None: there were none so far.
        self._on_devices: DeviceMemory | None = None
        self._begin()
        forgotten_by_children(self)

    def _begin(self) -> None:
        self._pool = Pool(self.address, self._limit, self._max_waiting)
        self._waiting: Waiter | None = None
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Resets the connection in a child process after a fork, and closes the child's copies of the parent's sockets."""
        pool, waiting = self._pool, self._waiting
        self._begin()
        self._pool.is_closed = pool.is_closed
        pool.abandon()
        if waiting is not None:
            waiting.abandon()

    def _waiter(self) -> Waiter:
        with self._lock:
            if self._waiting is None:
                self._waiting = Waiter()
            return self._waiting

    def post(self, path: str, body: bytes, patience: float | None = None, deadline: float | None = None) -> Any:
        """Posts ``body``, a JSON text. Returns the answer's JSON, or None if it is empty. Raises ServingError on failure.

        ``patience`` is the seconds to wait for a server that cannot be reached, or None for the constructor's value.
        ``deadline`` is the time of ``time.monotonic()`` in seconds at which to stop waiting, or None for no limit.
        """
        return self._request("POST", path, b"Content-Type: application/json\r\n", [body], deadline, patience)[0]

    def _request(
        self,
        method: str,
        path: str,
        fields: bytes = b"",
        body: Sequence[Buffer] = (),
        deadline: float | None = None,
        patience: float | None = None,
        read: Callable[[HttpResponse], Any] | None = None,
    ) -> tuple[Any, dict[bytes, bytes]]:
        head = f"{method} {path}".encode() + self._fields + fields
        if method != "GET":
            head += b"Content-Length: %d\r\n" % sum(map(len, body))
        # What is small leaves in one piece.
        pieces = [b"".join((head, b"\r\n", *body[:1])), *body[1:]]
        made = HttpExchange(pieces, read or _read, deadline, method == "GET")
        found: tuple[Any, dict[bytes, bytes]] = self._send(made, patience).result()
        return found

    def open(self, model: str, version: int = 0) -> Description:
        path = _path(model, version)
        (metadata, fields), config = self._request("GET", path), self.config(model, version)
        streams = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        sequences = "sequence_batching" in config
        self._declared[model, version] = {each["name"]: each["datatype"] for each in metadata["inputs"]}
        served = [int(each) for each in metadata.get("versions", ()) if str(each).isdigit()]
        return Description(
            {
                "model": model,
                "version": version or max(served, default=0),
                "metadata": metadata,
                "max_batch_size": int(config.get("max_batch_size", 0)),
                "streams": streams,
                "sequences": sequences,
                "pure": b"tensord-pure" in fields,
            }
        )

    def config(self, model: str, version: int) -> dict[str, Any]:
        path = f"{_path(model, version)}/config"
        return cast("dict[str, Any]", self._request("GET", path, read=_read_config)[0])

    def parameters(self, model: str, version: int) -> ModelParameters:
        return ModelParameters(self.manage, model, version)

    def manage(
        self,
        operation: str,
        model: str,
        version: int,
        name: str = "",
        said: Mapping[str, Any] | None = None,
        pieces: Sequence[Buffer] = (),
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Lists or changes the parameter sets of a model on the server. Arguments and answer: see ``LaneConnection.manage``.

        ``timeout`` is all that is waited for.
        """
        method, end = _OPERATIONS[operation]
        text = b"" if said is None else json.dumps(said, separators=(",", ":")).encode()
        fields = b"Inference-Header-Content-Length: %d\r\n" % len(text) if pieces else b""
        path = f"{_path(model, version)}/parameters{'/' * bool(name)}{quote(name, '')}{end}"
        deadline = None if timeout is None else time.monotonic() + timeout
        found = self._request(method, path, fields, [text, *pieces], deadline)[0]
        return {"parameters": found} if operation == "parameters" else cast("dict[str, Any]", found)

    def ask(self, call: Call) -> HttpRequest:
        pending = self._send(self._infer(call))
        if call.detached:
            pending.keep()
        return pending

    def _send(self, exchange: HttpExchange, patience: float | None = None) -> HttpRequest:
        return HttpRequest(self._pool, exchange, self._waiter, self._patience if patience is None else patience)

    exchange = ask

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        if self._pool.is_closed:
            raise Unavailable(CLOSED)
        return np.empty(shape, dtype)

    def empty_on(self, device: str, shape: tuple[int, ...], dtype: Any) -> Any:
        with self._lock:
            if self._on_devices is None:
                from tensord_client.device_memory import DeviceMemory

                self._on_devices = DeviceMemory(self.post)
        return self._on_devices.empty(shape, dtype, device)

    def _region(self, array: Any) -> tuple[str, int, int] | None:
        """Returns (region, offset in it, size in bytes) for an array that ``empty_on`` made, and None for any other array."""
        if isinstance(array, np.ndarray) or self._on_devices is None or array.memory is not self._on_devices:
            return None
        return cast("tuple[str, int, int]", array.place)

    def end_sequence(self, model: str, sequence_id: int | str) -> None:
        """Does nothing: the server ends idle sequences by itself."""

    def close(self) -> None:
        """Closes all HTTP connections. Requests that are in flight or wait for a connection fail with Cancelled. Idempotent.

        Raises Unavailable if a GPU's memory cannot be freed. The connections are closed all the same.
        """
        try:
            if self._on_devices is not None:
                self._on_devices.close()
        finally:
            self._pool.close()
            if self._waiting is not None:
                self._waiting.close()

    # --------------------------------------------------------------------------------------------------------- the codec

    def _infer(self, call: Call) -> HttpExchange:
        # What lies on a GPU is named, and the server uses it there.
        contents = [b"" if self._region(array) else content(array) for array in call.inputs.values()]
        head, size = self._head(call, contents)
        tail = sum(map(len, contents))
        lengths = b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n" % (size, size + tail)
        # What is small leaves in one piece.
        first = head[:-size] + lengths + head[-size:]
        pieces: list[Buffer] = [first, *contents] if tail > _SMALL else [b"".join([first, *contents])]
        decoder = _Decoder(call.places)
        read_next = decoder.read_next if call.streams else None
        return HttpExchange(pieces, decoder.read, call.deadline, call.pure, call.model, read_next)

    def _head(self, call: Call, contents: list[Buffer]) -> tuple[bytes, int]:
        key = None
        if call.is_bare:
            tensors = tuple(
                (name, array.dtype, array.shape, self._region(array)) for name, array in call.inputs.items()
            )
            outputs = tuple((name, self._wanted(call, name)) for name in call.outputs)
            sizes = tuple(map(len, contents))
            key = call.model, call.version, call.streams, outputs, tensors, sizes
            found = self._heads.get(key)
            if found is not None:
                return found
        text = self._request_json(call, contents)
        path = _path(call.model, call.version) + ("/infer_stream" if call.streams else "/infer")
        head = (
            b"POST " + path.encode() + self._fields + b"Content-Type: application/octet-stream\r\nTensord-Timing: 1\r\n"
        )
        sequence_id = call.scheduling.sequence_id
        if sequence_id and not self.address.path:
            # For a balancer between, which sees no bodies.
            head += b"Tensord-Sequence: %s\r\n" % quote(str(sequence_id), "").encode()
        if call.traceparent:
            head += b"Traceparent: %s\r\n" % call.traceparent.encode()
        made = head + text, len(text)
        if key is not None:
            if len(self._heads) >= _REMEMBERED:
                self._heads.clear()
            self._heads[key] = made
        return made

    def _wanted(self, call: Call, name: str) -> tuple[str, int, int] | None:
        place = call.places.get(name)
        return None if place is None else self._region(place)

    def _request_json(self, call: Call, contents: list[Buffer]) -> bytes:
        parameters: dict[str, Any] = {"binary_data_output": True, **call.parameters}
        for (name, row), value in zip(PARAMETERS.items(), call.scheduling):
            if value or (row.kind is Kind.FLAG and call.scheduling.sequence_id):
                parameters[name] = value
        said: dict[str, Any] = {"id": call.request_id} if call.request_id else {}
        said["parameters"] = parameters
        declared = self._declared.get((call.model, call.version), {})
        said["inputs"] = [
            {
                "name": name,
                "datatype": datatype_of(array.dtype, declared.get(name, "")),
                "shape": array.shape,
                "parameters": _parameters(self._region(array)) or {"binary_data_size": len(part)},
            }
            for (name, array), part in zip(call.inputs.items(), contents)
        ]
        if call.outputs:
            said["outputs"] = [
                {"name": name, "parameters": parameters} if parameters else {"name": name}
                for name in call.outputs
                for parameters in [_parameters(self._wanted(call, name))]
            ]
        try:
            return json.dumps(said, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"a parameter of the request cannot be sent: {error}") from None

    def __repr__(self) -> str:
        return f"<HttpConnection to {self.address}>"


def _read(response: HttpResponse) -> tuple[Any, dict[bytes, bytes]]:
    if response.status != 200:
        raise _error(response)
    return _json(response, response.text) if response.text else None, response.fields


def _read_config(response: HttpResponse) -> tuple[Any, dict[bytes, bytes]]:
    # Who needs a key for it, or has no such thing, serves the model all the same.
    return ({}, response.fields) if response.status in (403, 501) else _read(response)


def _read_life(response: HttpResponse) -> tuple[Any, dict[bytes, bytes]]:
    # Whoever refuses is there; a proxy says so where its server is not.
    if response.status in (502, 503, 504):
        raise Unreached(_error(response).message)
    return None, response.fields


class _Decoder:
    """Reads the answer to an inference request: JSON and the bytes of tensors."""

    def __init__(self, places: Mapping[str, Array]) -> None:
        self._places = places

    def read(self, response: HttpResponse) -> Answer:
        if response.status != 200:
            raise _error(response)
        tail = np.empty(0, np.uint8) if response.tail is None else response.tail
        answer = self._answer(_json(response, response.text), tail)
        answer.times = _timing(response.fields.get(b"tensord-timing"))
        return answer

    def read_next(self, response: HttpResponse) -> Answer | None:
        stream = response.stream
        kind = response.fields.get(b"content-type", _BINARY).partition(b";")[0].lower()
        if (stream or response.whole) and (kind != _BINARY or b"content-encoding" in response.fields):
            raise _unexpected(response, bytes(stream), "a model's responses")
        if len(stream) < _PART.size:
            return None
        text_size, tail_size = _PART.unpack_from(stream)
        end = _PART.size + text_size + tail_size
        if len(stream) < end:
            return None
        said = _json(response, bytes(stream[_PART.size : _PART.size + text_size]))
        tail = np.empty(tail_size, np.uint8)
        tail[:] = np.frombuffer(stream, np.uint8, tail_size, _PART.size + text_size)
        del stream[:end]
        if "error" in said:
            raise from_code(said.get("code", "UNKNOWN"), said["error"])
        return self._answer(said, tail)

    def _answer(self, said: Mapping[str, Any], tail: Array) -> Answer:
        outputs: dict[str, Array] = {}
        offset = 0
        try:
            for each in said["outputs"]:
                name, datatype, shape = each["name"], each["datatype"], tuple(each["shape"])
                size, place = each.get("parameters", {}).get("binary_data_size"), self._places.get(name)
                if place is not None and not isinstance(place, np.ndarray):
                    check_place(name, shape, dtype_of(datatype), place)
                    outputs[name] = place
                elif size is None:
                    outputs[name] = _from_json(each.get("data", []), datatype, shape)
                else:
                    made = decode(tail[offset : offset + size], datatype, shape)
                    outputs[name] = made if made.flags.aligned else made.copy()
                    offset += size
        except (ValueError, KeyError, TypeError) as error:
            raise Internal(f"the server's answer cannot be read: {error}") from error
        answer = Answer(written(outputs, self._places))
        answer.version = int(said.get("model_version", 0))
        answer.parameters = said.get("parameters", {})
        return answer


def _parameters(region: tuple[str, int, int] | None) -> dict[str, Any]:
    """Returns the "parameters" in a tensor's JSON that name its ``region`` (name, offset, bytes), or {} if that is None."""
    if region is None:
        return {}
    name, offset, byte_size = region
    said: dict[str, Any] = {"shared_memory_region": name, "shared_memory_byte_size": byte_size}
    return {**said, "shared_memory_offset": offset} if offset else said


def _from_json(data: Any, datatype: str, shape: tuple[int, ...]) -> Array:
    """Makes an array of an output that the server wrote as a JSON list."""
    if datatype == "BYTES":
        data = [str(each).encode() for each in data]
    made = np.empty(len(data), dtype_of(datatype))
    made[:] = data
    return made.reshape(shape)


def _timing(field: bytes | None) -> Timing | None:
    if field is None:
        return None
    try:
        said = {name.strip(): int(value) for name, _, value in (each.partition(b"=") for each in field.split(b","))}
        return Timing(said[b"queue-ns"], said[b"compute-ns"], said[b"copied-bytes"])
    except (ValueError, KeyError):
        return None


def _json(response: HttpResponse, text: bytes | bytearray) -> Any:
    """Parses ``text`` from the body of ``response``. Raises Internal if ``text`` is not valid JSON."""
    try:
        return json.loads(text)
    except ValueError:
        raise _unexpected(response, bytes(text), "JSON") from None


def _unexpected(response: HttpResponse, content: bytes, expected: str) -> ServingError:
    """Makes the error for an answer that is not ``expected``, such as a proxy's page."""
    fields = [response.fields.get(name, b"").decode("latin-1") for name in (b"content-type", b"content-encoding")]
    kind = ", ".join(filter(None, fields)) or "no content type"
    return Internal(f"the server answered with {kind}, {reprlib.repr(content)}, where {expected} are expected")


def _error(response: HttpResponse) -> ServingError:
    try:
        message = str(json.loads(response.text)["error"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered with status {response.status}"
    return from_status(response.status, message)


def _path(model: str, version: int) -> str:
    quoted = quote(model, "")
    return f"/v2/models/{quoted}/versions/{version}" if version else f"/v2/models/{quoted}"


def reached(address: Address, patience: float, fields: bytes = b"") -> HttpConnection:
    """Makes a connection over HTTP, checks that a server answers there, and returns the connection.

    ``patience`` is the seconds that later requests wait for a lost server. ``fields`` are additional header lines for every
    request, each with CRLF at its end. Raises Unavailable if no server answers within 10 seconds.
    """
    connection = HttpConnection(address, patience=patience, fields=fields)
    try:
        until = time.monotonic() + _LONGEST
        connection._request("GET", "/v2/health/live", deadline=until, patience=0.0, read=_read_life)
    except ServingError as error:
        connection.close()
        where = "" if str(address) in error.message else f"{address}: "
        raise Unavailable(where + error.message) from None
    return connection
