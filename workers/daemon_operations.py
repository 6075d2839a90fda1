"""Has the daemon carry out what a model's code requests: load or unload a model, or tell whether a model is ready.

    a model's thread ─▶ loop ─▶ Call to the supervisor ─▶ Load to this and other workers ─▶ Reply ─▶ that thread

A model may request the load of another model while it is being loaded itself. The loader's thread then waits for the other
model, so another thread carries out loads meanwhile. The supervisor refuses a load that would wait for itself.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable

from tensord.shm.channel import Channel
from tensord.shm.control_records import ControlCall, Reply
from tensord.shm.errors import Unavailable
from tensord.shm.operations import LoadModel, ModelReady, UnloadModel
from tensord.workers.calls.caller import ModelPort
from tensord.workers.threads.inbox import Inbox
from tensord.workers.threads.work_thread import WorkThread

#: Loads that may wait for others at a time.
_MAX_WAITING = 16


class DaemonOperations:
    """Sends the daemon what a model's code requests: to load or unload a model, or to tell whether it is ready.

    Any thread may call ``ask``. Only the loop's thread may call the other methods.
    """

    def __init__(self, channel: Channel, loader: WorkThread, inbox: Inbox) -> None:
        self._channel = channel
        self._loader = loader
        self._inbox = inbox
        self._numbers = itertools.count(1)
        #: Call id -> callback for its reply, and whether a load waits for it.
        self._asked: dict[int, tuple[Callable[[Reply], None], bool]] = {}

    def ask(self, operation: LoadModel | UnloadModel | ModelReady, port: ModelPort) -> bytes:
        """Has the daemon carry out an operation for a model. Waits for the result and returns it.

        ``port``: connects the model's code with the worker.
        Raises ServingError: the daemon refused, or the operation failed.
        """
        answer: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        waits = port.loading and isinstance(operation, LoadModel)
        if isinstance(operation, LoadModel) and waits:
            operation = LoadModel(operation.name, operation.config, operation.files, within=port.name)
        with self._loader.standing_aside(always=True) if waits else contextlib.nullcontext():
            self._inbox.post(lambda: self._ask(operation, waits, answer.put))
            reply = answer.get()
        reply.check()
        return reply.result

    def is_ready(self, name: str, version: int, answered: Callable[[bool], None]) -> None:
        """Asks the daemon whether any worker serves a version of a model. Version 0 stands for any version.

        The loop calls ``answered`` with the result, which is False if the daemon cannot tell.
        """
        self._ask(ModelReady(name, version), False, lambda reply: answered(reply.result == b"true"))

    def _ask(
        self, operation: LoadModel | UnloadModel | ModelReady, waits: bool, answered: Callable[[Reply], None]
    ) -> None:
        waiting = sum(each for _, each in self._asked.values())
        if waits and waiting >= _MAX_WAITING:
            answered(Reply.refusing(0, Unavailable(f"{waiting} loads wait for others, and no more may")))
            return
        call_id = next(self._numbers)
        self._asked[call_id] = answered, waits
        self._channel.put(ControlCall(call_id, operation))

    def answered(self, reply: Reply) -> None:
        """Passes a reply of the supervisor to whoever waits for it."""
        answered, _ = self._asked.pop(reply.call_id)
        answered(reply)

    def __repr__(self) -> str:
        return f"<DaemonOperations {len(self._asked)} asked>"
