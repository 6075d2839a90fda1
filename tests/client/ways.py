"""Every way to a model with one surface: their models, and what gives each of them the methods of a client."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tensord_client import errors

from tensord import testing
from tensord.shm.arrays import DTYPES
from tests.daemon_process import PATIENCE
from tests.protocol.stepped_models import COUNTS
from tests.repositories import applying, echo_models, faulty_models, scale_model, write_model

EXAMPLES = Path(__file__).parent.parent.parent / "examples/models"
WAYS = ("testing", "folder", "tcp", "unix", "lane", "awaited", "lane awaited")


def models(repository: Path) -> Path:
    scale_model(repository)
    scale_model(repository, factor=5.0, version=2)
    (repository / "scale/config.pbtxt").write_text("version_policy { all {} }")
    echo_models(repository, ("BF16", "FP16", "BOOL", "INT64"))
    faulty_models(repository)
    shutil.rmtree(repository / "does_not_load")
    write_model(repository, "counts", COUNTS)
    shutil.copytree(EXAMPLES / "running_mean", repository / "running_mean")
    write_model(
        repository,
        "nested",
        """
        inputs = {"text": {"ids": "INT32[2]"}, "plain/name": "INT32[2]"}
        outputs = {"y": "INT32[2]"}

        def create(path, config, device):
            return (lambda params, inputs: {"y": inputs["text"]["ids"] + 10 * inputs["plain/name"]}), {}
        """,
    )
    write_model(
        repository,
        "priorities",
        """
        max_batch_size, inputs, outputs, request = 4, {"x": "FP32[1]"}, {"y": "UINT32[1]"}, {"priority": "UINT32"}

        def create(path, config, device):
            return (lambda params, inputs, request: {"y": request["priority"]}), {}
        """,
    )
    write_model(
        repository,
        "tree",
        """
        import typing

        Hand = typing.NamedTuple("Hand", [("force", str), ("torque", str)])
        inputs = {"goal": ("FP32[2]", "FP32[2]"), "hand": Hand("FP32[1]", "FP32[1]"), "rest": "FP32[2]"}
        outputs = {"y": "FP32[2]"}

        def create(path, config, device):
            def apply(params, inputs):
                return {"y": sum(inputs["goal"]) + sum(inputs["hand"]) + inputs["rest"]}

            return apply, {}
        """,
    )
    write_model(
        repository,
        "waits",
        applying(
            """
            until = pathlib.Path(inputs["path"][0].decode())
            until.with_suffix(".begun").touch()
            while not until.exists():
                time.sleep(0.01)
            return {"y": __import__("numpy").ones(1, "int32")}
            """,
            "path BYTES[1]",
            "y INT32[1]",
            more="import pathlib, time\nhost = True",
        ),
        # A queue that is so short belongs to one worker: of several, each would begin one and keep the newest of its own.
        "dynamic_batching { default_queue_policy { max_queue_size: 7 } }",
    )
    write_model(
        repository,
        "three",
        applying(
            """
            for i in range(int(inputs["n"][0])):
                yield {
                    "i": np.full((2, i + 1), i, np.int32),
                    "h": np.full(1, i, np.float16),
                    "s": np.array([b"\\xff%d" % i], object),
                }
                if i == 3:
                    raise ValueError("three is enough")
            """,
            "n INT32[1]",
            "i INT32[2,n], h FP16[1], s BYTES[1]",
            more="host = True",
        ),
    )
    return repository


class Loaded:
    """Gives ``tensord.testing`` the method names of a client."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._models: list[testing.Model] = []

    def model(self, name: str, version: int = 0, timeout: float | None = None) -> testing.Model:
        model = testing.load(self._repository / name, version)
        model.timeout = timeout
        self._models.append(model)
        return model

    def empty(self, tensor: Any, dtype: Any = None, shape: Any = None) -> Any:
        if isinstance(tensor, testing.Tensor):
            dtype, wanted = DTYPES[tensor.datatype], [abs(size) for size in tensor.shape]
            return np.empty(wanted if shape is None else shape, dtype)
        return np.empty(tensor, dtype)

    def close(self) -> None:
        for model in self._models:
            model.close()


class Awaited:
    """Wraps an asynchronous client, model or sequence: its methods wait for the result on a loop in another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, made: Any) -> None:
        self._loop = loop
        self._made = made

    def _wait(self, awaited: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaited, self._loop).result(PATIENCE)

    def model(self, name: str, version: int = 0, timeout: float | None = None) -> Awaited:
        return Awaited(self._loop, self._wait(self._made.model(name, version, timeout=timeout)))

    def __call__(self, inputs: Any, **own: Any) -> Any:
        return self._wait(self._made(inputs, **own))

    def submit(self, inputs: Any, **own: Any) -> Any:
        async def begin() -> Any:
            return self._made.submit(inputs, **own)

        async def answer() -> Any:
            return await begun

        begun = self._wait(begin())
        return asyncio.run_coroutine_threadsafe(answer(), self._loop)

    def stream(self, inputs: Any, **own: Any) -> Iterator[Any]:
        async def begun() -> AsyncIterator[Any]:
            return self._made.stream(inputs, **own)  # type: ignore[no-any-return]

        responses = self._wait(begun())

        def each() -> Iterator[Any]:
            try:
                while (found := self._wait(anext(responses, None))) is not None:
                    yield found
            finally:
                self._wait(responses.aclose())

        return each()

    def sequence(self, *arguments: Any) -> Awaited:
        return Awaited(self._loop, self._made.sequence(*arguments))

    def prepare(self, inputs: Any, **own: Any) -> Any:
        call = self._made.prepare(inputs, **own)
        return lambda: self._wait(call())

    def latest(self) -> Awaited:
        return Awaited(self._loop, self._made.latest())

    def put(self, inputs: Any) -> None:
        async def put() -> None:
            self._made.put(inputs)

        self._wait(put())

    def get(self, timeout: float | None = None) -> Any:
        return self._wait(self._made.get(timeout))

    def __enter__(self) -> Awaited:
        self._wait(self._made.__aenter__())
        return self

    def __exit__(self, *raised: Any) -> None:
        self._wait(self._made.__aexit__(*raised))

    def close(self) -> None:
        self._wait(self._made.close())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


class Raises:
    """Expects an error with that name and text, of the client's or the server's family."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert error is not None, f"nothing was raised, {self._name} was expected"
        assert (kind.__name__, error.message) == (self._name, self._text) or (
            kind.__name__ == self._name and self._text.endswith("...") and error.message.startswith(self._text[:-3])
        ), repr(error)
        assert isinstance(error, (errors.ServingError, testing.ServingError))
        return True


X = np.arange(12, dtype=np.float32).reshape(3, 4)
