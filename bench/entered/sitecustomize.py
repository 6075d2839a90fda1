"""Records which of our functions a process calls: ``bench.route`` puts this folder into PYTHONPATH.

Python imports a module of this name in every process that finds one, before anything else. Calls are written to a file of the
process, ``PID.calls`` in the folder that ROUTE_FOLDER names, as long as the byte in that folder's file ``row`` is not zero.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

#: Functions that send to a socket: with the last of them a record or an answer has left.
_SENDS = {"send", "sendall", "sendmsg", "sendto", "send_fds"}
#: Part of the function around them, in newer versions of Python.
_INLINE = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


class _Recorder:
    """A profile function for all threads, which writes each call to the process's file."""

    def __init__(self, folder: Path, ours: str) -> None:
        self._path = folder / f"{os.getpid()}.calls"
        self._ours = ours
        self._fd = -1
        with (folder / "row").open("rb") as file:
            self._row = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._row[0] == 0 or event not in ("call", "c_call"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(self._ours):
            return
        if event == "call" and code.co_name not in _INLINE:
            self._write("call", code.co_filename.removeprefix(self._ours), code.co_qualname)
        elif event == "c_call" and argument.__name__ in _SENDS:
            self._write("send", code.co_filename.removeprefix(self._ours), code.co_qualname)

    def _write(self, kind: str, file: str, function: str) -> None:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(self._fd, f"{' '.join(sys.orig_argv)}\n".encode())
        line = f"{self._row[0]} {time.monotonic_ns()} {threading.get_native_id()} {kind} {file} {function}\n"
        os.write(self._fd, line.encode())


if "ROUTE_FOLDER" in os.environ:
    _recorder = _Recorder(Path(os.environ["ROUTE_FOLDER"]), os.environ["ROUTE_TREE"])
    threading.setprofile(_recorder.profile)
    sys.setprofile(_recorder.profile)
