"""Asks a daemon over its control socket, as tensorctl does: one question and its answer per connection.

Without a path the socket is looked for where daemons have it by default (``tensord.daemon.control.runtime_directory``). If
several daemons of one user answer, none of them is chosen.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensord.daemon.control import runtime_directory
from tensord.daemon.control.runtime_directory import CONTROL_SOCKET


class Unreachable(Exception):
    """No daemon answers, or several do and no path chooses one of them; the message names the sockets."""


class Refused(Exception):
    """The daemon answered a question with an error, which is this exception's message."""


def ask(path: Path | None, environment: Mapping[str, str], question: Mapping[str, Any]) -> Any:
    """Sends a command of tensorctl to a daemon and returns its result, as decoded JSON.

    Args:
      path: the daemon's control socket; None: it is looked for in the default folders.
      environment: the variables that name these folders.
      question: the command and its arguments: the fields of ``OperatorQuestion``.

    Raises Unreachable: not exactly one daemon answers; Refused: the daemon answered with an error.
    """
    sock = _connected(path) if path is not None else _found(environment)
    try:
        with sock:
            where = sock.getpeername()
            sock.sendall(json.dumps(question).encode() + b"\n")
            with sock.makefile("rb") as lines:
                answer = lines.readline()
    except OSError:
        answer = b""
    if not answer.endswith(b"\n"):
        raise Unreachable("the daemon stopped before it answered")
    try:
        fields = json.loads(answer)
        if "error" not in fields:
            return fields["result"]
        error = fields["error"].strip()
    except (ValueError, TypeError, LookupError, AttributeError):
        raise Unreachable(f"what answers at '{where}' is not the control socket of a tensord") from None
    raise Refused(error)


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise Unreachable(f"no tensord answers at '{path}': {error.strerror or error}") from None
    return sock


def _found(environment: Mapping[str, str]) -> socket.socket:
    """Looks for control sockets in the default folders, and connects to the daemon in the first folder where one answers.

    Raises Unreachable: none answers in any folder, or several do in that folder.
    """
    reasons: list[str] = []
    for folder in runtime_directory.searched(environment):
        answering: dict[Path, socket.socket] = {}
        for path in runtime_directory.sockets(folder, CONTROL_SOCKET):
            try:
                answering[path] = _connected(path)
            except Unreachable as error:
                reasons.append(str(error).removeprefix("no tensord answers at "))
        if len(answering) == 1:
            return answering.popitem()[1]
        for sock in answering.values():
            sock.close()
        if answering:
            named = ", ".join(f"'{path}'" for path in answering)
            raise Unreachable(
                f"{len(answering)} daemons of this user answer, at {named}: name one with --socket or TENSORCTL_SOCKET"
            )
    raise Unreachable(f"no tensord answers at {'; '.join(reasons)}")
