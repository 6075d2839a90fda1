"""Runs the programs of several models one after the other on one batch: a pipeline.

    inputs of the batch ─▶ program of model 1 ─▶ program of model 2 ─▶ program of model 3 ─▶ outputs of the batch

The inputs are zeros in rows that no request fills. The programs compute these rows as well.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import address_of
from tensord.workers.programs.executable import Content, Executable, ExecutionDevice, Gathering
from tensord.workers.programs.gather_buffer import GatherBuffer
from tensord.workers.programs.weight import work_of
from tensord.workers.tensors.output_layout import OutputLayout
from tensord.workers.tensors.request_tensors import RequestTensors
from tensord.workers.tensors.signature import Signature

#: Bound of floating-point operations and bytes of all programs together, which take a core some ten milliseconds. Larger
#: pipelines run one program at a time, so that other requests run in between, and join them.
_MOST_WORK = 1 << 28


class Link(NamedTuple):
    """One program of a pipeline, and which tensors of the pipeline are its inputs and outputs."""

    executable: Executable
    #: (input of the model, tensor of the pipeline, whether that was made on another device).
    inputs: tuple[tuple[str, str, bool], ...]
    #: (output of the model, tensor of the pipeline).
    outputs: tuple[tuple[str, str], ...]


class PipelineProgram(Gathering):
    """Runs the programs of an ensemble's steps one after another. Each batch is padded to a fixed number of rows."""

    memory_needed = None

    def __init__(
        self, signature: Signature, links: Sequence[Link], outputs: Sequence[str], rows: int, device: ExecutionDevice
    ) -> None:
        """Makes a pipeline, which runs the compiled programs in ``links`` one after another, in this order.

        ``signature``: the inputs and outputs of the pipeline. ``outputs``: the names of the outputs that ``run`` returns.
        ``rows``: the batch size of each program.
        """
        self._outputs = tuple(outputs)
        self._links = list(links)
        taken = {tensor for link in links for _, tensor, _ in link.inputs}
        lead = (rows,) if signature.batches else ()
        self._device = device
        specs = [spec for spec in signature.inputs.values() if spec.name in taken]
        shapes = [(spec.name, spec.dtype, (*lead, *spec.model_dims)) for spec in specs]
        super().__init__(signature, rows, device.inputs(shapes))
        #: Sum of the programs' ``Executable.share``.
        self.share = sum([link.executable.share for link in links])
        #: The layout of its outputs, once it has run.
        self.layout: OutputLayout | None = None
        #: How long calls of each program have taken so far.
        self.call_ns = [0] * len(links)
        #: True if a run has so much to do that the programs should rather be run one at a time.
        self.long = sum([max(work_of(link.executable.program)) for link in links]) > _MOST_WORK

    @functools.cached_property
    def _buffers(self) -> dict[str, GatherBuffer]:
        return {name: GatherBuffer(name, array, self._batches) for name, array in self.gathered.items()}

    def takes(self, requests: Sequence[RequestTensors]) -> bool:
        """Returns whether the pipeline can run ``requests``. On a CPU it always can.

        On a GPU it can if all inputs came inside the requests' records on their lanes, and no output is to stay on the GPU.
        """
        return not self._device.remote or all(request.small and not request.stays for request in requests)

    def gather(self, requests: Sequence[RequestTensors]) -> tuple[dict[str, Any], int]:
        """Makes the argument of ``compute`` from the requests' inputs. Returns this argument and the number of bytes copied.

        A single request's inputs may be used where they lie.
        Raises Unavailable: the GPU has no memory left. Raises DeviceLost: the GPU failed.
        """
        lying: dict[str, Any] = {}
        copied = 0
        alone = len(requests) == 1 and requests[0].rows == self.rows and not requests[0].small
        for name, buffer in self._buffers.items():
            array: Any = requests[0].arrays[name] if alone else None
            # A tensor that is not in host memory is fetched by gathering it.
            if isinstance(array, np.ndarray) and not address_of(array) % ALIGNMENT:
                lying[name] = array
            else:
                copied += buffer.fill(requests)
        return self.arguments() | lying, copied

    def run(self) -> list[Content]:
        """Runs the programs on the inputs that the caller has written to the addresses in ``self.memory``.

        Returns the outputs in host memory. After that the memory of the inputs may be used again. Errors of programs are raised
        unchanged.
        """
        return self.contents_of(self.compute(self.arguments()))

    def contents_of(self, arrays: Sequence[Any]) -> list[Content]:
        """Waits for ``compute``'s result ``arrays`` and returns it in host memory. Errors of programs are raised unchanged."""
        return self._device.contents_of(arrays)

    def compute(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Calls all programs in order. Returns the outputs, which may not be computed yet. Errors are raised unchanged."""
        tensors = dict(arguments)
        with self._precision():
            began = time.monotonic_ns()
            for number, (executable, inputs, outputs) in enumerate(self._links):
                made = executable.call(
                    executable.parameters(),
                    {name: np.asarray(tensors[tensor]) if moved else tensors[tensor] for name, tensor, moved in inputs},
                )
                for name, tensor in outputs:
                    tensors[tensor] = made[name]
                ended = time.monotonic_ns()
                self.call_ns[number] += ended - began
                began = ended
            return [tensors[name] for name in self._outputs]

    def __repr__(self) -> str:
        return f"<PipelineProgram of {len(self._links)} programs, {self.rows} rows>"
