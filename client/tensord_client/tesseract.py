"""A gateway for programs that use ``tesseract-core`` or ``tesseract-jax``: each served model is a Tesseract.

    python -m tensord_client.tesseract --address 127.0.0.1:8910               (pip install 'tensord-client[tesseract]')

    Tesseract.from_url("http://127.0.0.1:8910/MODEL") ─ JSON ─▶ Gateway ─ Point ─▶ TesseractModel ─ tensors of rows ─▶ the daemon
                                                      ◀─ JSON with arrays ─────────┘

An array is {"shape": [3], "dtype": "float32", "data": {"encoding": "base64", "buffer": "..."}}. Inputs of a model with a batch
dimension have that dimension, or have it not and are one row; an input of one row goes with any number of rows of others.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import gc
import json
import logging
import math
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tensord_client import errors, gateway
from tensord_client import tesseract_wire as wire
from tensord_client.asynchronous import AsyncClient, AsyncModel, connect_async
from tensord_client.common.arrays import Array
from tensord_client.common.derivatives import PULL_BACK, PUSH_FORWARD, Names, named
from tensord_client.common.tensors import Tensor, cast, flat
from tensord_client.errors import InvalidArgument, NotFound, ResultsHeld, ServingError

_log = logging.getLogger("tensord_client.tesseract")
#: The program's flags besides those of all gateways.
_FLAGS: dict[str, tuple[Any, str]] = {
    "--address": ("127.0.0.1:8910", "HOST:PORT where clients connect; a model is at /MODEL and /MODEL/versions/N"),
    "--max-connections": (256, "clients at the same time"),
    "--max-body-bytes": (64 << 20, "bytes of a request, and of the arrays of an answer"),
    "--max-held-bytes": (256 << 20, "bytes of all requests under way, and of their answers"),
    "--max-products": (4096, "products for a Jacobian: elements of outputs or inputs, the fewer ones, by rows"),
    "--body-timeout": (30, "seconds for a request to come"),
    "--idle-timeout": (60, "seconds from connecting, or from an answer's first byte, to the next request"),
}
#: Models that stay looked up, and seconds in which a look-up is not repeated.
_MODELS, _FRESH = 256, 1.0
#: Connections above --max-connections that are told so, with 503; bytes of an answer that may wait to be sent.
_TOLD, _PIECE = 64, 1 << 16
_ENDPOINTS = ("apply", "abstract_eval", "jacobian", "jacobian_vector_product", "vector_jacobian_product")
_METHODS = {**dict.fromkeys(_ENDPOINTS, "POST"), "health": "GET", "openapi.json": "GET"}
#: The products by endpoint: the kind of derivative, the field with vectors, and what the names of further fields begin with.
_PRODUCTS = {
    "jacobian_vector_product": (PUSH_FORWARD, "tangent_vector", "jvp"),
    "vector_jacobian_product": (PULL_BACK, "cotangent_vector", "vjp"),
}
_Hold = Callable[[int], None]
_Part = Callable[[int, int], dict[str, Array]]
_Paths = Mapping[str, str]
_STATUS = {InvalidArgument: 422, NotFound: 404, errors.Unavailable: 503, errors.DeadlineExceeded: 504}


class TesseractModel:
    """A model and its derivatives, in ``tesseract-core``'s terms. The shapes of inputs and outputs are those of one row."""

    def __init__(
        self,
        model: AsyncModel,
        derivatives: Mapping[str, AsyncModel],
        lacking: Mapping[str, str],
        bounds: argparse.Namespace,
    ) -> None:
        """Serves ``model``, and its ``derivatives`` by kind, such as "pull_back". ``bounds``: the gateway's options.

        ``lacking``: kind -> the error text, for kinds that the model lacks.
        """
        self._lacking = lacking
        self._model, self._bounds, self.made, self._batched = model, bounds, time.monotonic(), model.max_batch_size > 0
        self.inputs, self.outputs = (
            {each.name: each._replace(shape=each.shape[self._batched :]) for each in tensors}
            for tensors in (model.inputs, model.outputs)
        )
        names, taken, given = Names(model.name), wire.floating(self.inputs), wire.floating(self.outputs)
        known = {PULL_BACK: (names.cotangent, given, taken), PUSH_FORWARD: (names.tangent, taken, given)}
        #: For each kind of derivative, and "" for the model: what is asked, what names of vectors and of what it gives begin
        #: with, the vectors that it takes besides inputs, and what it gives.
        self._kinds: Any = {"": (model, "", {}, self.outputs)}
        self._kinds.update((kind, (each, *known[kind])) for kind, each in derivatives.items())

    def schema(self) -> dict[str, Any]:
        """Returns the model's OpenAPI document."""
        has = {name: each[0] in self._kinds for name, each in _PRODUCTS.items()} | {"jacobian": len(self._kinds) > 1}
        title = {"title": self._model.name, "version": str(self._model.version)}
        return wire.openapi(title, [each for each in _ENDPOINTS if has.get(each, True)], self.inputs, self.outputs)

    async def answer(self, endpoint: str, body: Mapping[str, Any], hold: _Hold) -> dict[str, Any]:
        """Returns the answer of an endpoint to the ``body`` of a request. ``hold`` counts the bytes of the model's answers.

        Raises: InvalidArgument: the request does not fit the model or exceeds a bound.  ServingError: any error of the daemon.
        """
        known, most = {name: each.datatype for name, each in self.inputs.items()}, self._bounds.max_body_bytes
        values = wire.by_name(flat(wire.tree(body.get("inputs")), known), self.inputs, "inputs")
        point = wire.Point(values, self.inputs, self._batched, most, endpoint == "abstract_eval")
        if endpoint == "apply":
            found = await self._rows("", wire.slices(point.arrays), point.rows, hold)
            return {name: point.output(each) for name, each in found.items()}
        if lacking := sorted(self.inputs.keys() - values.keys()):
            raise InvalidArgument(f"inputs lack {lacking}")
        shapes = {name: each.shape for name, each in self.outputs.items()}
        if any(-1 in shape for shape in shapes.values()):  # only the model knows
            found = await self._rows("", wire.slices(point.arrays), point.rows, hold)
            shapes = {name: each.shape[1:] for name, each in found.items()}
        if endpoint == "abstract_eval":
            if texts := [name for name, each in self.outputs.items() if each.datatype == "BYTES"]:
                raise InvalidArgument(f"output '{texts[0]}' has texts, for which {endpoint} has no words: use apply")
            rows = (point.rows,) * point.has_rows
            return {
                name: {"shape": rows + shapes[name], "dtype": wire.dtype_for(self.outputs[name]).name}
                for name in shapes
            }
        kind, field, begins = _PRODUCTS.get(endpoint, ("", "", "jac"))
        by = wire.by_name(body.get(f"{begins}_inputs"), wire.floating(self.inputs), f"{begins}_inputs")
        of = wire.by_name(body.get(f"{begins}_outputs"), wire.floating(self.outputs), f"{begins}_outputs")
        if not kind:
            return await self._jacobian(point, shapes, by, of, hold)
        (_, prefix, vectors, _), forward = self._asked(kind), kind == PUSH_FORWARD
        came, listed, given = wire.by_name(body.get(field), vectors, field), by if forward else of, dict(point.arrays)
        if came.keys() != listed.keys():
            raise InvalidArgument(f"{field} has {sorted(came)}, and {sorted(listed)} were listed")
        for name, tensor in vectors.items():
            row = point.arrays[name].shape[1:] if forward else shapes[name]
            array = (
                wire.read(name, wire.tree(came[name]), tensor, most) if name in came else np.zeros(row, tensor.dtype)
            )
            given[prefix + name] = array = point.in_rows(prefix + name, array, len(row))
            if array.shape[1:] != row:
                raise InvalidArgument(f"{field} has '{name}' with rows {[*array.shape[1:]]}, {[*row]} is expected")
        found = await self._rows(kind, wire.slices(given), point.rows, hold)
        if forward:
            return {path: point.output(found[name]) for name, path in of.items()}
        return {path: point.gradient(name, found[name]) for name, path in by.items()}

    async def _jacobian(self, point: wire.Point, shapes: Any, by: _Paths, of: _Paths, hold: _Hold) -> dict[str, Any]:
        taken, given = {name: point.arrays[name].shape[1:] for name in by}, {name: shapes[name] for name in of}
        inputs, outputs = (sum(map(math.prod, each.values())) for each in (taken, given))
        back = PULL_BACK in self._kinds and (PUSH_FORWARD not in self._kinds or outputs <= inputs)
        kind, units, count, rows = PUSH_FORWARD, taken, inputs, point.rows
        if back:
            kind, units, count = PULL_BACK, given, outputs
        wire.bound("the Jacobian takes", count * rows, "products", self._bounds.max_products)
        wire.bound("the Jacobian takes", 8 * inputs * outputs * rows * rows, "bytes", self._bounds.max_body_bytes)
        starts = dict(zip(units, np.cumsum([0, *map(math.prod, units.values())]).tolist()))
        _, prefix, vectors, _ = self._asked(kind)

        def part(begin: int, end: int) -> dict[str, Array]:
            unit, row = np.divmod(np.arange(begin, end), rows)
            made = {name: array[row] for name, array in point.arrays.items()}
            for name, tensor in vectors.items():
                shape = shapes[name] if back else point.arrays[name].shape[1:]
                at = unit[:, None] - starts.get(name, count)
                array = (at == np.arange(math.prod(shape))).astype(wire.dtype_for(tensor))
                made[prefix + name] = cast(name, array.reshape(len(row), *shape), tensor.datatype)
            return made

        found = await self._rows(kind, part, count * rows, hold)

        def block(output: str, name: str) -> Array:
            unit, other = (output, name) if back else (name, output)
            array = found[other].reshape(count, rows, *found[other].shape[1:])
            array = np.moveaxis(array[starts[unit] : starts[unit] + math.prod(units[unit])], 0, 1 if back else -1)
            return point.block(name, array.reshape(rows, *given[output], *taken[name]))

        return {path: {to: block(output, name) for name, to in by.items()} for output, path in of.items()}

    def _asked(self, kind: str) -> tuple[AsyncModel, str, dict[str, Tensor], dict[str, Tensor]]:
        if kind in self._lacking:
            raise InvalidArgument(self._lacking[kind])
        return self._kinds[kind]  # type: ignore[no-any-return]

    async def _rows(self, kind: str, part: _Part, rows: int, hold: _Hold) -> dict[str, Array]:
        """Asks the model, or its derivative ``kind`` if that is not "", for the outputs of ``rows`` rows."""
        model, prefix, _, given = self._asked(kind)
        tensors, parts, most = named(prefix, given), list[dict[str, Array]](), self._bounds.max_body_bytes
        # A row of a Jacobian may be all that a request may have.
        row = sum(each.nbytes for each in part(0, 1).values())
        step = max(1, min(model.max_batch_size, most // max(row, 1)))
        for at in range(0, max(rows, 1), step):
            # A model without a batch dimension has one row, which is taken away and put back.
            inputs, lift = part(at, min(at + step, rows)), ... if model.max_batch_size else None
            inputs = inputs if lift else {name: each[0, ...] for name, each in inputs.items()}
            while len(parts) * step <= at:
                try:
                    with await model(inputs, outputs=[*tensors]) as got:
                        found = {n: gateway.without_bfloat16(got[n], each.datatype) for n, each in tensors.items()}
                        parts.append({name: np.array(each)[lift] for name, each in found.items()})
                except ResultsHeld:
                    # Answers to others have come, and hold the worker's memory until their tasks have run.
                    await asyncio.sleep(0)
            size = sum(each.nbytes for part in parts for each in part.values())
            wire.bound("the answer has", size, "bytes", most)
            hold(sum(each.nbytes for each in parts[-1].values()))
        return {name: np.concatenate([each[prefix + name] for each in parts]) for name in given}


class TesseractGateway:
    """Serves a daemon's models to programs that use ``tesseract-core``, with JSON over HTTP. Bounds the bytes of requests."""

    def __init__(self, client: AsyncClient, options: argparse.Namespace) -> None:
        self._client, self._options, self._looking_up = client, options, asyncio.Lock()
        self._keys = [b"Basic " + base64.b64encode(b"api-key:" + key) for key in gateway.keys(options)]
        self._served: dict[tuple[str, int], TesseractModel] = {}
        #: Bytes of requests under way, and of their answers until these are sent.
        self._held = 0
        #: The application that a server of ASGI runs.
        paths = "/{model}/{endpoint}", "/{model}/versions/{version}/{endpoint}"
        self.app = Starlette(routes=[Route(path, self) for path in paths])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request with JSON, or with a status and a sentence."""
        own, most = 0, self._options.max_held_bytes

        def hold(count: int) -> None:
            nonlocal own
            own, self._held = own + count, self._held + count
            if self._held > most:
                raise HTTPException(503, f"requests and their answers have {self._held} bytes, at most {most} may be")

        try:
            status, kind, content = await self._answer(Request(scope, receive), hold)
            headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            # Each piece waits until the client has read most of those before, or has left.
            for end in range(_PIECE, len(content) + _PIECE, _PIECE):
                more = {"more_body": end < len(content)}
                await send({"type": "http.response.body", "body": content[end - _PIECE : end], **more})
        finally:
            self._held -= own

    async def _answer(self, request: Request, hold: _Hold) -> tuple[int, bytes, bytes]:
        try:
            kind, told = await self._respond(request, hold)
            content = json.dumps(told, default=wire.written).encode()
            hold(len(content))
            return 200, kind, content
        except HTTPException as error:
            status, text = error.status_code, error.detail
        except ServingError as error:
            status, text = _STATUS.get(type(error), 500), gateway.told(error)
        except RecursionError:
            status, text = 422, "the request has too many lists and maps in each other"
        except ClientDisconnect:
            status, text = 400, "the client has left"
        except Exception:
            _log.exception("a request has no answer")
            status, text = 500, "the gateway has failed with this request; its log says why"
        # Clients make an error of pydantic's of a list, and show the text of others.
        detail: Any = [{"type": "value_error", "loc": ["body"], "msg": text}] if status == 422 else text
        return status, b"application/json", json.dumps({"detail": detail}).encode()

    async def _respond(self, request: Request, hold: _Hold) -> tuple[bytes, dict[str, Any]]:
        """Answers a request. Returns the answer's content type and JSON object. ``hold`` is told how many bytes it takes."""
        if not gateway.is_known(self._keys, request.headers.getlist("authorization")):
            raise HTTPException(401, "the API key is none of the gateway's: use http://api-key:KEY@HOST:PORT/MODEL")
        version = request.path_params.get("version", "0")
        if not (version.isascii() and version.isdigit() and len(version) <= 18):
            raise HTTPException(404, "a model is at /MODEL or /MODEL/versions/N")
        endpoint, asked = request.path_params["endpoint"], (request.path_params["model"], int(version))
        if _METHODS.get(endpoint) != request.method:
            raise HTTPException(405 if endpoint in _METHODS else 404, f"no {request.method} is at {endpoint}")
        if endpoint not in _ENDPOINTS:
            found = await self._model(asked, _FRESH)
            return b"application/json", {"status": "ok"} if endpoint == "health" else found.schema()
        if not wire.is_accepted(request.headers.get("accept", "*/*")):
            raise HTTPException(406, "this server answers with json+base64, neither compressed nor in memory of CUDA")
        body, found = await self._read(request, hold), await self._model(asked, math.inf)
        try:
            answer = await found.answer(endpoint, body, hold)
        except (InvalidArgument, NotFound):
            # Perhaps the model was loaded anew, and takes something else now.
            again = await self._model(asked, _FRESH)
            if again is found:
                raise
            answer = await again.answer(endpoint, body, hold)
        return b"application/json+base64", answer

    async def _read(self, request: Request, hold: _Hold) -> dict[str, Any]:
        """Reads the JSON object in a request's body. Calls ``hold`` with the number of bytes of each part that comes."""
        content = bytearray()
        most, seconds = self._options.max_body_bytes, self._options.body_timeout

        async def receive() -> None:
            async for chunk in request.stream():
                content.extend(chunk)
                hold(len(chunk))
                if len(content) > most:
                    raise HTTPException(413, f"a request has {len(content)} bytes or more, at most {most} may be")

        try:
            await asyncio.wait_for(receive(), seconds)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"{len(content)} bytes came in {seconds} s, and no end of a request") from None
        return wire.parsed(content)

    async def _model(self, asked: tuple[str, int], age: float) -> TesseractModel:
        """Returns a model by name and version. If it was looked up more than ``age`` seconds ago, looks it up again."""
        async with self._looking_up:  # so that one connection to the daemon is enough
            found = self._served.get(asked)
            if found is None or time.monotonic() - found.made > age:
                self._served.pop(asked, None)
                model = await self._client.model(*asked, timeout=self._options.timeout)
                kinds, lacking = dict[str, AsyncModel](), dict[str, str]()
                for kind in (PULL_BACK, PUSH_FORWARD):
                    try:
                        kinds[kind] = await model.derivative(kind)
                    except InvalidArgument as error:
                        lacking[kind] = error.message
                found = self._served[asked] = TesseractModel(model, kinds, lacking, self._options)
                if len(self._served) > _MODELS:
                    del self._served[next(iter(self._served))]
            return found


class _Connection(H11Protocol):
    """A client's connection. It is closed at once if there are too many. Connections in a TLS handshake count, too."""

    _opening: ClassVar[weakref.WeakSet[_Connection]] = weakref.WeakSet()

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if len(self.connections) + len(self._opening) >= (self.limit_concurrency or 0) + _TOLD:
            raise ConnectionRefusedError  # asyncio closes it
        self._opening.add(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._opening.discard(self)
        super().connection_made(transport)


class _Server(uvicorn.Server):
    """Logs when it serves, and closes connections without a request."""

    #: The connections without a request: each with its last request, and the time since when it has none.
    _idle: Mapping[Any, tuple[Any, float]] = {}

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _log.info("models are served on %s", ", ".join("{}:{}".format(*each.getsockname()) for each in sockets or ()))
        gateway.notify(b"READY=1")

    async def on_tick(self, counter: int) -> bool:
        # uvicorn's own limit begins anew with each byte.
        now, idle = time.monotonic(), dict[Any, tuple[Any, float]]()
        for each in list[Any](self.server_state.connections):
            if each.cycle is None or each.cycle.response_started:
                last, since = self._idle.get(each, (None, now))
                idle[each] = each.cycle, since if each.cycle is last else now
                if now - idle[each][1] > self.config.timeout_keep_alive:
                    each.transport.abort()
        self._idle = idle
        if not counter % 10 and _Connection._opening:
            gc.collect()  # Python before 3.11.9 keeps those whose handshake has failed in cycles
        return await super().on_tick(counter)


async def run(options: argparse.Namespace) -> None:
    """Serves clients until SIGTERM or SIGINT.

    Raises OSError if a file or the address cannot be used, or ServingError if there is no daemon.
    """
    stop = gateway.stop_event()
    async with await connect_async(options.server, wait=options.wait, patience=options.patience) as client:
        own: Any = {"lifespan": "off", "ws": "none", "log_config": None, "access_log": False, "server_header": False}
        # Of the two parsers only that of h11 has a limit for headers.
        own.update(http=_Connection, limit_concurrency=options.max_connections, timeout_keep_alive=options.idle_timeout)
        # Whoever connects could fill the log.
        own.update(timeout_graceful_shutdown=options.stop_timeout, log_level="error")
        own.update(ssl_certfile=options.certificate, ssl_keyfile=options.key)
        server = _Server(uvicorn.Config(TesseractGateway(client, options).app, **own))
        with gateway.listening(options) as listening:
            serving, stopped = (asyncio.ensure_future(each) for each in (server.serve([listening]), stop.wait()))
            await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
            gateway.notify(b"STOPPING=1")
            server.should_exit = True
            await serving
            stopped.cancel()


def main() -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    gateway.main("tensord_client.tesseract", run(gateway.options("tensord_client.tesseract", __doc__, _FLAGS, None)))


if __name__ == "__main__":
    main()
