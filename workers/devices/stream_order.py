"""Our copies after XLA's work: a stream of ours waits for a result on the device, and no thread does.

    XLA's stream    | program ▸ its event |
    ours                                  └▶ waits for it ▸ copy ▸ the one thing that a thread waits for

This is what DLPack's stream is for. The other way round it costs more than it spares: XLA learns what to wait for when it is
given memory by DLPack, each time, which takes longer than a small transfer does.
"""

from __future__ import annotations

from typing import Any

import jax

from tensord.shm.cuda_regions import Context


class StreamOrder:
    """Of one device."""

    __slots__ = ("_context", "_said")

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Whether XLA says it to the device, as far as is known: its back end for GPUs does.
        self._said = True

    def follow(self, made: jax.Array) -> Any:
        """What the calling thread queues from now on happens once ``made`` is computed.

        Returns: what must be kept until it has happened. Raises what computing it has raised so far.
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
