"""Sends many requests on one gRPC stream and reads the responses as cheaply as Python can: it counts them without parsing.

Parsing each response would take longer than the step that made it, and the client's own queue would be measured as the server's.
Here a read costs a receive and two searches, however many responses it brought.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np
from tritonclient.grpc import service_pb2

from bench.grpc_connection import HELLO, WINDOW, headers
from tensord.daemon.grpc import frames

#: In every response, and in the last one of a request.
_RESPONSE = b"\x0a\x06writer"
_FINAL = b"triton_final_response\x12\x02\x08\x01"
#: A server that says nothing for so long has lost a request.
_PATIENCE = 60.0
_STREAM = 1
#: Tokens of a request's prompt.
PROMPT = 8


class TokenStream:
    """A connection with one stream to the model ``writer``, read by a thread. ``responses`` and ``ended`` only grow."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, _PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(HELLO + headers("ModelStreamInfer", _STREAM))
        self._news = threading.Condition()
        #: Responses that came, of all requests, those with the final mark, and when the last read was over, in seconds.
        self.responses = self.ended = 0
        self.read_at = 0.0
        #: Requests that were sent.
        self.asked = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def ask(self, count: int, times: int = 1) -> None:
        """Sends ``times`` requests at once, each for ``count`` tokens."""
        message = _request(list(range(PROMPT)), count)
        content = bytes(1) + len(message).to_bytes(4, "big") + message
        self._socket.sendall(frames.frame(frames.DATA, 0, _STREAM, content) * times)
        self.asked += times

    def wait(self, responses: int = 0, ended: int = 0) -> tuple[int, float]:
        """Waits until so many responses and ended requests have come. Raises TimeoutError: they do not.

        Returns how many responses have come then, and when the last were read.
        """
        with self._news:
            if not self._news.wait_for(lambda: self.responses >= responses and self.ended >= ended, _PATIENCE):
                raise TimeoutError(f"{self.responses} responses of {responses}, {self.ended} ends of {ended}")
            return self.responses, self.read_at

    def _read(self) -> None:
        responses, ended, ungranted = Count(_RESPONSE), Count(_FINAL), 0
        with contextlib.suppress(OSError):
            while chunk := self._socket.recv(1 << 20):
                now = time.perf_counter()
                ungranted += len(chunk)
                came = responses.add(chunk), ended.add(chunk)
                if ungranted >= WINDOW // 4:
                    self._socket.sendall(frames.window_update(0, ungranted))
                    ungranted = 0
                with self._news:
                    self.responses += came[0]
                    self.ended += came[1]
                    self.read_at = now
                    self._news.notify_all()

    def close(self) -> None:
        """Closes the connection; responses under way are dropped."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


class Count:
    """Counts occurrences of a mark in bytes that arrive in pieces."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._rest = b""

    def add(self, piece: bytes) -> int:
        """Returns how many occurrences of the mark this piece completes."""
        text = self._rest + piece
        self._rest = text[1 - len(self._mark) :]
        return text.count(self._mark)


def _request(prompt: Sequence[int], count: int) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="writer")
    for key, values in (("prompt", prompt), ("count", [count])):
        request.inputs.add(name=key, datatype="INT32", shape=[len(values)])
        request.raw_input_contents.append(np.array(values, np.int32).tobytes())
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request.SerializeToString()
