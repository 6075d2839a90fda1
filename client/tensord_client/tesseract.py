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
import json
import logging
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tensord_client import errors, gateway
from tensord_client.asynchronous import AsyncClient, AsyncModel, connect_async
from tensord_client.common.arrays import Array
from tensord_client.common.derivatives import PULL_BACK, PUSH_FORWARD, Names, lacks, named
from tensord_client.common.tensors import Tensor, cast, flat
from tensord_client.errors import InvalidArgument, NotFound, ResultsHeld, ServingError
from tensord_client.tesseract_wire import (
    MAX_VALUES,
    Point,
    bound,
    by_name,
    floating,
    paths,
    read_array,
    tree,
    wire_dtype,
    written,
)

_log = logging.getLogger("tensord_client.tesseract")
#: The program's flags besides those of all gateways.
_FLAGS: dict[str, tuple[Any, str]] = {
    "--address": ("127.0.0.1:8910", "HOST:PORT where clients connect; a model is at /MODEL and /MODEL/versions/N"),
    "--max-connections": (256, "clients at the same time"),
    "--max-body-bytes": (64 << 20, "bytes of a request, and of the arrays of an answer"),
    "--max-held-bytes": (256 << 20, "bytes of all requests under way"),
    "--max-products": (
        4096,
        "products for a Jacobian: elements of its outputs or inputs, whichever are fewer, by rows",
    ),
    "--body-timeout": (30, "seconds for a request to come"),
}
#: What an Accept header has to have, and may not.
_ACCEPTED = re.compile(r"\*/\*|application/(\*|json\+base64)")
_REFUSED = re.compile(r'(transport|compression)="?(?!none)')
#: Models that stay looked up, and seconds in which a look-up is not repeated.
_MODELS, _FRESH = 256, 1.0
_ENDPOINTS = ("apply", "abstract_eval", "jacobian", "jacobian_vector_product", "vector_jacobian_product")
#: The products by endpoint: the kind of derivative, the field with vectors, and what the names of further fields begin with.
_PRODUCTS = {
    "jacobian_vector_product": (PUSH_FORWARD, "tangent_vector", "jvp"),
    "vector_jacobian_product": (PULL_BACK, "cotangent_vector", "vjp"),
}
_STATUS = {InvalidArgument: 422, NotFound: 404, errors.Unavailable: 503, errors.DeadlineExceeded: 504}


class TesseractModel:
    """A model as clients see it, with its derivatives. The shapes of ``inputs`` and ``outputs`` are those of a row."""

    def __init__(self, model: AsyncModel, derivatives: Mapping[str, AsyncModel], bounds: argparse.Namespace) -> None:
        """Serves a ``model`` that was just looked up. ``bounds``: the program's options."""
        self._model, self._bounds, self.made, self._batched = model, bounds, time.monotonic(), model.max_batch_size > 0
        self.inputs, self.outputs = (
            {each.name: each._replace(shape=each.shape[self._batched :]) for each in tensors}
            for tensors in (model.inputs, model.outputs)
        )
        names, taken, given = Names(model.name), floating(self.inputs), floating(self.outputs)
        known = {PULL_BACK: (names.cotangent, given, taken), PUSH_FORWARD: (names.tangent, taken, given)}
        #: For each kind of derivative, and "" for the model: what is asked, what names of vectors and of what it gives begin
        #: with, the vectors that it takes besides inputs, and what it gives.
        self._kinds: Any = {"": (model, "", {}, self.outputs)}
        self._kinds.update((kind, (each, *known[kind])) for kind, each in derivatives.items())

    def schema(self) -> dict[str, Any]:
        """Returns the OpenAPI document: endpoints, inputs, outputs, which of them have derivatives, and encodings."""
        schemas = dict[str, Any]()
        for side, tensors in (("Input", self.inputs), ("Output", self.outputs)):
            chosen = floating(tensors) if len(self._kinds) > 1 else {}
            schemas[f"Apply_{side}Schema"] = {
                "type": "object",
                "properties": {
                    name: {"type": "string"} if each.datatype == "BYTES" else {"type": "object", "array_flags": []}
                    for name, each in tensors.items()
                },
            }
            schemas[f"Apply{side}Schema"] = {
                # Without a shape, auto_experimental would send rows, and sum gradients by inputs that vmap does not map.
                "differentiable_arrays": {
                    path: {"shape": each.shape, "dtype": wire_dtype(each).name}
                    for name, each in chosen.items()
                    for path in paths(name)
                }
            }
        has = {"jacobian": len(self._kinds) > 1, **{name: each[0] in self._kinds for name, each in _PRODUCTS.items()}}
        answered = {"responses": {"200": {"description": "OK"}}}
        endpoints = {f"/{name}": {"post": answered} for name in _ENDPOINTS if has.get(name, True)}
        return {
            "openapi": "3.1.0",
            "info": {"title": self._model.name, "version": str(self._model.version)},
            "paths": {**endpoints, "/health": {"get": answered}},
            "components": {"schemas": schemas},
            "x-supported-output-formats": ["json+base64"],
            "x-supported-gpu-transports": ["none"],
            "x-supported-compressions": ["none"],
        }

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what an endpoint answers to the ``body`` of a request.

        Raises: InvalidArgument: the request does not fit the model or exceeds a bound.  ServingError: the daemon's.
        """
        known, most = {name: each.datatype for name, each in self.inputs.items()}, self._bounds.max_body_bytes
        values = by_name(flat(tree(body.get("inputs")), known), self.inputs, "inputs")
        point = Point(values, self.inputs, self._batched, most, endpoint == "abstract_eval")
        if endpoint == "apply":
            found = await self._rows("", _slices(point.arrays), point.rows)
            return {name: point.output(each) for name, each in found.items()}
        if lacking := sorted(self.inputs.keys() - values.keys()):
            raise InvalidArgument(f"inputs lack {lacking}")
        shapes = {name: each.shape for name, each in self.outputs.items()}
        if any(-1 in shape for shape in shapes.values()):  # only the model knows
            found = await self._rows("", _slices(point.arrays), point.rows)
            shapes = {name: each.shape[1:] for name, each in found.items()}
        if endpoint == "abstract_eval":
            if texts := [name for name, each in self.outputs.items() if each.datatype == "BYTES"]:
                raise InvalidArgument(f"output '{texts[0]}' has texts, for which {endpoint} has no words: use apply")
            rows = (point.rows,) * point.has_rows
            return {
                name: {"shape": rows + shapes[name], "dtype": wire_dtype(self.outputs[name]).name} for name in shapes
            }
        kind, field, begins = _PRODUCTS.get(endpoint, ("", "", "jac"))
        by = by_name(body.get(f"{begins}_inputs"), floating(self.inputs), f"{begins}_inputs")
        of = by_name(body.get(f"{begins}_outputs"), floating(self.outputs), f"{begins}_outputs")
        if not kind:
            return await self._jacobian(point, shapes, by, of)
        (_, prefix, vectors, _), forward = self._asked(kind), kind == PUSH_FORWARD
        came, listed, given = by_name(body.get(field), vectors, field), by if forward else of, dict(point.arrays)
        if came.keys() != listed.keys():
            raise InvalidArgument(f"{field} has {sorted(came)}, and {sorted(listed)} were listed")
        for name, tensor in vectors.items():
            row = point.arrays[name].shape[1:] if forward else shapes[name]
            array = read_array(name, tree(came[name]), tensor, most) if name in came else np.zeros(row, tensor.dtype)
            given[prefix + name] = array = point.in_rows(prefix + name, array, len(row))
            if array.shape[1:] != row:
                raise InvalidArgument(f"{field} has '{name}' with rows {[*array.shape[1:]]}, {[*row]} is expected")
        found = await self._rows(kind, _slices(given), point.rows)
        if forward:
            return {path: point.output(found[name]) for name, path in of.items()}
        return {path: point.gradient(name, found[name]) for name, path in by.items()}

    async def _jacobian(
        self, point: Point, shapes: Any, by: Mapping[str, str], of: Mapping[str, str]
    ) -> dict[str, Any]:
        """Returns the Jacobian of outputs by inputs, of products with unit vectors, which are rows of few requests."""
        taken, given = {name: point.arrays[name].shape[1:] for name in by}, {name: shapes[name] for name in of}
        inputs, outputs = (sum(map(math.prod, each.values())) for each in (taken, given))
        back = PULL_BACK in self._kinds and (PUSH_FORWARD not in self._kinds or outputs <= inputs)
        kind, units, count, rows = PUSH_FORWARD, taken, inputs, point.rows
        if back:
            kind, units, count = PULL_BACK, given, outputs
        bound("the Jacobian takes", count * rows, "products", self._bounds.max_products)
        bound("the Jacobian takes", 8 * inputs * outputs * rows * rows, "bytes", self._bounds.max_body_bytes)
        starts = dict(zip(units, np.cumsum([0, *map(math.prod, units.values())]).tolist()))
        _, prefix, vectors, _ = self._asked(kind)

        def part(begin: int, end: int) -> dict[str, Array]:
            unit, row = np.divmod(np.arange(begin, end), rows)
            made = {name: array[row] for name, array in point.arrays.items()}
            for name, tensor in vectors.items():
                shape = shapes[name] if back else point.arrays[name].shape[1:]
                at = unit[:, None] - starts.get(name, count)
                array = (at == np.arange(math.prod(shape))).astype(wire_dtype(tensor))
                made[prefix + name] = cast(name, array.reshape(len(row), *shape), tensor.datatype)
            return made

        found = await self._rows(kind, part, count * rows)

        def block(output: str, name: str) -> Array:
            unit, other = (output, name) if back else (name, output)
            array = found[other].reshape(count, rows, *found[other].shape[1:])
            array = np.moveaxis(array[starts[unit] : starts[unit] + math.prod(units[unit])], 0, 1 if back else -1)
            return point.block(name, array.reshape(rows, *given[output], *taken[name]))

        return {path: {to: block(output, name) for name, to in by.items()} for output, path in of.items()}

    def _asked(self, kind: str) -> tuple[AsyncModel, str, dict[str, Tensor], dict[str, Tensor]]:
        if kind not in self._kinds:
            raise InvalidArgument(lacks(self._model.name, kind))
        return self._kinds[kind]  # type: ignore[no-any-return]

    async def _rows(self, kind: str, part: Callable[[int, int], dict[str, Array]], rows: int) -> dict[str, Array]:
        """Asks the model or a derivative for ``rows`` rows, as many at a time as it takes. Returns rows of what it gives.

        ``part``: returns its inputs from one row to another.
        """
        model, prefix, _, given = self._asked(kind)
        tensors, parts, step = named(prefix, given), list[dict[str, Array]](), model.max_batch_size or 1
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
            bound("the answer has", size, "bytes", self._bounds.max_body_bytes)
        return {name: np.concatenate([each[prefix + name] for each in parts]) for name in given}


def _slices(arrays: Mapping[str, Array]) -> Callable[[int, int], dict[str, Array]]:
    return lambda begin, end: {name: each[begin:end] for name, each in arrays.items()}


class TesseractGateway:
    """Answers clients' requests: reads them within bounds, finds their models, and makes JSON of what these give."""

    def __init__(self, client: AsyncClient, options: argparse.Namespace) -> None:
        self._client, self._options, self._looking_up = client, options, asyncio.Lock()
        self._keys = [b"Basic " + base64.b64encode(b"api-key:" + key) for key in gateway.keys(options)]
        self._served: dict[tuple[str, int], TesseractModel] = {}
        #: Bytes of requests under way.
        self._held = 0
        methods = {**dict.fromkeys(_ENDPOINTS, "POST"), "health": "GET", "openapi.json": "GET"}
        #: The application that a server of ASGI runs.
        self.app = Starlette(
            routes=[
                Route(f"/{{model}}{version}/{name}", self.respond, methods=[method])
                for version in ("", "/versions/{version}")
                for name, method in methods.items()
            ]
        )

    async def respond(self, request: Request) -> Response:
        """Answers a request with JSON, or with a status and a sentence."""
        try:
            return await self._respond(request)
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
        return Response(json.dumps({"detail": detail}), status, media_type="application/json")

    async def _respond(self, request: Request) -> Response:
        if not gateway.is_known(self._keys, request.headers.getlist("authorization")):
            raise HTTPException(401, "the API key is none of the gateway's: use http://api-key:KEY@HOST:PORT/MODEL")
        version = request.path_params.get("version", "0")
        if not (version.isascii() and version.isdigit() and len(version) <= 18):
            raise HTTPException(404, "a model is at /MODEL or /MODEL/versions/N")
        endpoint, asked = request.url.path.rpartition("/")[2], (request.path_params["model"], int(version))
        if endpoint not in _ENDPOINTS:
            found = await self._model(asked, _FRESH)
            told = {"status": "ok"} if endpoint == "health" else found.schema()
            return Response(json.dumps(told), media_type="application/json")
        accepted = request.headers.get("accept", "*/*")
        if not _ACCEPTED.search(accepted) or _REFUSED.search(accepted):
            raise HTTPException(406, "this server answers with json+base64, neither compressed nor in memory of CUDA")
        async with self._read(request) as body:
            found = await self._model(asked, math.inf)
            try:
                answer = await found.answer(endpoint, body)
            except (InvalidArgument, NotFound):
                # Perhaps the model was loaded anew, and takes something else now.
                again = await self._model(asked, _FRESH)
                if again is found:
                    raise
                answer = await again.answer(endpoint, body)
            return Response(json.dumps(answer, default=written), media_type="application/json+base64")

    @contextlib.asynccontextmanager
    async def _read(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """Reads the body of a request, which counts as held within the block."""
        content, body = bytearray(), None
        held, most, seconds = self._options.max_held_bytes, self._options.max_body_bytes, self._options.body_timeout

        async def receive() -> None:
            async for chunk in request.stream():
                content.extend(chunk)
                self._held += len(chunk)
                if len(content) > most:
                    raise HTTPException(413, f"a request has {len(content)} bytes or more, at most {most} may be")
                if self._held > held:
                    raise HTTPException(503, f"requests under way have {self._held} bytes, at most {held} may be")

        try:
            try:
                await asyncio.wait_for(receive(), seconds)
            except asyncio.TimeoutError:
                raise HTTPException(408, f"{len(content)} bytes came in {seconds} s, and no end of a request") from None
            # Each value and each container but the first has one of these before it; base64 has none.
            bound("the request has", sum(map(content.count, (b",", b"[", b"{"))), "values besides base64", MAX_VALUES)
            with contextlib.suppress(ValueError, RecursionError):
                body = json.loads(content)
            if not isinstance(body, dict):
                raise InvalidArgument("the request is no object in JSON, or too deep")
            yield body
        finally:
            self._held -= len(content)

    async def _model(self, asked: tuple[str, int], age: float) -> TesseractModel:
        """Returns a model, looked up at most ``age`` seconds ago. Raises ServingError: it is not served, or not ready."""
        async with self._looking_up:  # so that one connection to the daemon is enough
            found = self._served.get(asked)
            if found is None or time.monotonic() - found.made > age:
                self._served.pop(asked, None)
                model = await self._client.model(*asked, timeout=self._options.timeout)
                kinds = {}
                for kind in (PULL_BACK, PUSH_FORWARD):
                    with contextlib.suppress(InvalidArgument):
                        kinds[kind] = await model.derivative(kind)
                found = self._served[asked] = TesseractModel(model, kinds, self._options)
                if len(self._served) > _MODELS:
                    del self._served[next(iter(self._served))]
            return found


class _Server(uvicorn.Server):
    """Says when it serves. Signals are the program's own."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _log.info("models are served on %s", ", ".join("{}:{}".format(*each.getsockname()) for each in sockets or ()))
        gateway.notify(b"READY=1")


async def run(options: argparse.Namespace) -> None:
    """Serves clients until SIGTERM or SIGINT. Raises: OSError: a file or the address cannot be used.  ServingError: no daemon."""
    place, stop = gateway.place(options), gateway.stop_event()
    async with await connect_async(options.server, wait=options.wait, patience=options.patience) as client:
        app, most, seconds = TesseractGateway(client, options).app, options.max_connections, options.stop_timeout
        own: Any = {"lifespan": "off", "ws": "none", "log_config": None, "access_log": False, "server_header": False}
        own.update(limit_concurrency=most, timeout_keep_alive=60, timeout_graceful_shutdown=seconds)
        # Whoever connects could fill the log.
        own.update(log_level="error", ssl_certfile=options.certificate, ssl_keyfile=options.key)
        server = _Server(uvicorn.Config(app, **own))
        with socket.create_server(place) as listening:
            serving, stopped = (asyncio.ensure_future(each) for each in (server.serve([listening]), stop.wait()))
            await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
            gateway.notify(b"STOPPING=1")
            server.should_exit = True
            await serving
            stopped.cancel()


def main() -> None:
    """Runs the gateway as a program."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    gateway.main("tensord_client.tesseract", run(gateway.options("tensord_client.tesseract", __doc__, _FLAGS, None)))


if __name__ == "__main__":
    main()
