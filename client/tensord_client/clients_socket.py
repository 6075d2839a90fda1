"""The daemon's socket for clients (SEQPACKET). Requests and answers are JSON messages, which may bring file descriptors.

a client sends                              the daemon answers with
{"hello": {}}                               a description of the daemon
{"open": {"model": "m", "version": 0}}      a description of the model, and a socket for each new lane to its workers
a request that fails                        {"error": "the sentence", "code": "..."}
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Sequence
from typing import Any

from tensord_client.common.descriptors import descriptors_in
from tensord_client.errors import Unavailable, Unknown, from_code

_MAX_ANSWER = 128 << 10
_MAX_FDS = 253


class ClientsSocket:
    """A client's connection to the daemon's socket for clients. It sends one request at a time. Not thread-safe."""

    def __init__(self, path: str, timeout: float) -> None:
        """Connects to the daemon's socket at ``path``. Connecting, sending and receiving each wait at most ``timeout`` seconds.

        Raises Unavailable if no daemon accepts the connection.
        """
        self._path = path
        self._timeout = timeout
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._sock.settimeout(timeout)
            self._sock.connect(path)
        except OSError as error:
            self._sock.close()
            raise Unavailable(f"no tensord serves at {path}: {error.strerror or error}") from error

    def ask(
        self, request: dict[str, Any], wait: float | None = 0.0, fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[socket.socket]]:
        """Sends a request and waits for the answer. Returns the answer's JSON object and the sockets that came with it.

        Args:
          wait: the seconds that the daemon may take for the request, in addition to this connection's timeout. None means no
            limit.
          fds: file descriptors that are sent with the request. The caller still has to close them.

        Raises: ServingError: the answer is an error.  Unavailable: the daemon does not answer or has gone away, or its answer
          was cut off; this connection is closed then.  Unknown: the answer is no JSON object; this connection is closed then.
        """
        try:
            self._sock.settimeout(None if wait is None else self._timeout + max(0.0, wait))
            content = json.dumps(request).encode()
            if fds:
                socket.send_fds(self._sock, [content], list(fds))
            else:
                self._sock.send(content)
            # ``socket.recv_fds`` ignores its flags: children would inherit the descriptors.
            content, ancillary, flags, _ = self._sock.recvmsg(
                _MAX_ANSWER + 1, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BaseException as error:
            self.close()  # an answer may be owed
            if not isinstance(error, OSError):
                raise
            raise Unavailable(f"the daemon at {self._path} does not answer: {error.strerror or error}") from error
        with contextlib.ExitStack() as refused:
            came = descriptors_in(ancillary)
            for fd in came:
                refused.callback(os.close, fd)
            if not content or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                self.close()
                if content:
                    raise Unavailable(
                        f"the answer of the daemon at {self._path} was cut: no descriptor is left in this process"
                    )
                raise Unavailable(f"the daemon at {self._path} has closed the connection")
            try:
                answer = json.loads(content)
                if not isinstance(answer, dict):
                    raise ValueError("no object")
            except ValueError as error:
                self.close()
                raise Unknown(f"the daemon at {self._path} answered with no JSON object") from error
            if "error" in answer:
                raise from_code(str(answer.get("code", "")), str(answer["error"]))
            refused.pop_all()
            return answer, [socket.socket(fileno=fd) for fd in came]

    def close(self) -> None:
        """Closes the connection. The daemon then ends all lanes that were opened over it. Idempotent."""
        self._sock.close()

    def has_ended(self) -> bool:
        """Returns whether the daemon or this process has ended the connection, which is closed then. Never waits."""
        if self._sock.fileno() >= 0:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if poll.poll(0):  # no answer is owed, so it is the end
                self.close()
        return self._sock.fileno() < 0
