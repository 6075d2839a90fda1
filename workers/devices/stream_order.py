"""Orders the worker's copies after XLA's work: the worker's stream waits on the device for a result, and no thread has to wait.

    XLA's stream    | program ▸ its event |
    the worker's                          └▶ waits for it ▸ copy ▸ the one event that a thread waits for

DLPack's stream argument does this. The reverse, XLA waiting for copies, costs more than it saves: XLA takes the stream only with
each import of memory by DLPack, which takes longer than a small transfer.
"""

from __future__ import annotations

from typing import Any

import jax

from tensord.shm.cuda_regions import Context


class StreamOrder:
    """Makes the worker's copies to and from one device wait, on the device, for the programs whose outputs they read."""

    __slots__ = ("_context", "_said")

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Whether XLA can make the device wait, as its back end for GPUs does; True until a failure.
        self._said = True

    def follow(self, made: jax.Array) -> Any:
        """Makes everything that the calling thread queues on the worker's stream from now on wait until ``made`` is computed.

        Returns: an object to keep until the queued work is done.
        Raises: what computing ``made`` has raised so far.
        """
        if self._said:
            try:
                return made.__dlpack__(stream=self._context.stream())  # type: ignore[call-arg]
            except jax.errors.JaxRuntimeError as error:
                if "UNIMPLEMENTED" not in str(error):
                    raise
                self._said = False
        return jax.block_until_ready(made)

    def __repr__(self) -> str:
        return f"<StreamOrder said to the {'device' if self._said else 'host'}>"
