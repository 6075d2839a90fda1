"""Runs a process that owns GPU memory, as a client of the daemon does, with the real ``tritonclient.utils.cuda_shared_memory``.

A handle cannot be opened by the process that made it, and the tests must survive an owner that is killed: so it is a process of
its own, on a real driver or on the tests' stand-in, and carries out commands.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np

from tests import prepared


class CudaOwner:
    """A process with CUDA regions, each by its name. Use as a context manager."""

    def __init__(self, environment: dict[str, str]) -> None:
        given, questions = os.pipe()
        answers, output = os.pipe()
        try:
            self._process = prepared.start(["tests.cuda_owner"], environment=environment, given=given, output=output)
        finally:
            os.close(given)
            os.close(output)
        self._questions, self._answers = os.fdopen(questions, "wb"), os.fdopen(answers, "rb")

    def __enter__(self) -> CudaOwner:
        return self

    def __exit__(self, *_: object) -> None:
        self._questions.close()
        self._process.wait()
        self._answers.close()

    def _ask(self, *question: Any) -> Any:
        pickle.dump(question, self._questions)
        self._questions.flush()
        good, answer = pickle.load(self._answers)
        if not good:
            raise RuntimeError(answer)
        return answer

    def create(self, name: str, byte_size: int, device: int = 0) -> bytes:
        """Allocates a region; returns its handle in base64, as tritonclient's clients take it."""
        return self._ask("create", name, byte_size, device)

    def put(self, name: str, *arrays: np.ndarray[Any, Any]) -> None:
        """Writes arrays into a region, one behind the other, from its start."""
        self._ask("put", name, arrays)

    def get(self, name: str, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> np.ndarray[Any, Any]:
        """Reads an array from a region at byte ``offset``."""
        return self._ask("get", name, np.dtype(dtype), shape, offset)

    def destroy(self, name: str) -> None:
        """Frees a region."""
        self._ask("destroy", name)

    def register(self, url: str, name: str, byte_size: int) -> None:
        """Registers a region at a daemon over gRPC, on a connection of the process that it keeps open."""
        self._ask("register", url, name, byte_size)

    def kill(self) -> None:
        """Kills the process with SIGKILL and waits until it is dead."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    import tritonclient.utils.cuda_shared_memory as cuda

    regions: dict[str, Any] = {}
    clients: dict[str, Any] = {}

    def create(name: str, byte_size: int, device: int) -> bytes:
        regions[name] = cuda.create_shared_memory_region(name, byte_size, device)
        return cuda.get_raw_handle(regions[name])

    def put(name: str, arrays: tuple[Any, ...]) -> None:
        cuda.set_shared_memory_region(regions[name], list(arrays))

    def get(name: str, dtype: Any, shape: tuple[int, ...], offset: int) -> Any:
        end = offset + int(np.prod(shape)) * dtype.itemsize
        content = cuda.get_contents_as_numpy(regions[name], np.uint8, [end])
        return content[offset:].view(dtype).reshape(shape)

    def destroy(name: str) -> None:
        cuda.destroy_shared_memory_region(regions.pop(name))

    def register(url: str, name: str, byte_size: int) -> None:
        import tritonclient.grpc as grpcclient

        if url not in clients:
            clients[url] = grpcclient.InferenceServerClient(url)
        clients[url].register_cuda_shared_memory(name, cuda.get_raw_handle(regions[name]), 0, byte_size)

    questions, answers = os.fdopen(0, "rb"), os.fdopen(1, "wb")
    verbs = {"create": create, "put": put, "get": get, "destroy": destroy, "register": register}
    while True:
        try:
            verb, *arguments = pickle.load(questions)
        except EOFError:
            break
        try:
            answer = (True, verbs[verb](*arguments))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()
    for name in list(regions):
        destroy(name)


if __name__ == "__main__":
    main()
