"""Has the daemon carry out what a model's code requests: load or unload a model, or tell whether a model is ready.

While model A is being loaded, its code may request the load of model B, unless the load of B waits for the load of A.
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
    """Sends the daemon what a model's code requests: to load or unload a model, or to tell whether a model is ready.

    Only the thread of the worker's event loop may call ``is_ready`` and ``answered``. Only other threads may call ``ask``.
    """

    def __init__(self, channel: Channel, loader: WorkThread, inbox: Inbox) -> None:
        self._channel = channel
        self._loader = loader
        self._inbox = inbox
        self._numbers = itertools.count(1)
        #: Call id -> callback for its reply, and whether a load waits for it.
        self._asked: dict[int, tuple[Callable[[Reply], None], bool]] = {}

    def ask(self, operation: LoadModel | UnloadModel | ModelReady, port: ModelPort) -> bytes:
        """Has the daemon carry out ``operation``, and waits for the result. Raises ServingError if the operation fails.

        Returns b"true" or b"false" for ModelReady. The result of LoadModel and UnloadModel has no meaning.
        ``port``: the ``ModelPort`` of the model whose code asks for the operation.
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

    def is_ready(self, name: str, version: int, awaits: bool, answered: Callable[[Reply], None]) -> None:
        """Asks the daemon whether any worker serves a version of a model. Version 0 stands for any version.

        The worker's event loop later calls ``answered`` with the daemon's reply.
        ``awaits``: if this worker is to load the version after others, the daemon replies once it was sent the load.
        """
        self._ask(ModelReady(name, version, awaits), False, answered)

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
