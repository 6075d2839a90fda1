"""Which GPU a request should go to because of the regions it names. Told by the supervisor, asked by the submitter.

Empty unless there are several workers, some of them on GPUs, and clients have registered CUDA regions: everything else is as near
to each worker. A worker on another device can use such a region as well, by a copy between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensord.daemon.submit.pending import Worker
from tensord.shm.control_records import ModelState, RegionPlace
from tensord.shm.device_names import gpu_of
from tensord.shm.messages import PreparedRequest, RegionSlice


class RegionPlaces:
    """Region name -> GPU, of one front."""

    def __init__(self) -> None:
        self._gpus: dict[str, str] = {}

    def update(self, place: RegionPlace) -> None:
        """A region came or went."""
        if place.device:
            self._gpus[place.region] = place.device
        else:
            self._gpus.pop(place.region, None)

    def __bool__(self) -> bool:
        return bool(self._gpus)

    def gpu_of(self, prepared: PreparedRequest) -> str:
        """The GPU that has most of the bytes that the request has in regions, "cuda:1"; "": any will do."""
        sizes: dict[str, int] = {}
        for place in _regions(prepared):
            if gpu := self._gpus.get(place.region, ""):
                sizes[gpu] = sizes.get(gpu, 0) + place.byte_size
        return max(sizes, key=lambda gpu: sizes[gpu], default="")

    def __repr__(self) -> str:
        return f"<RegionPlaces {len(self._gpus)} regions>"


def nearest(workers: Sequence[Worker], gpu: str, state: ModelState) -> Sequence[Worker]:
    """Those of a model's workers to choose from: on that GPU, none while they are replaced; all, if it is not meant for it."""
    if not is_meant_for(state, gpu):
        return workers
    return [worker for worker in workers if gpu_of(worker.device) == gpu]


def is_meant_for(state: ModelState, gpu: str) -> bool:
    """Whether the model is loaded by workers of that GPU, when they are there; "": of any."""
    return bool(gpu) and (not state.devices or any(gpu_of(device) == gpu for device in state.devices))


def _regions(prepared: PreparedRequest) -> list[RegionSlice]:
    inputs = [tensor.region for tensor in prepared.inputs if tensor.region is not None]
    return inputs + [output.region for output in prepared.outputs if output.region is not None]
