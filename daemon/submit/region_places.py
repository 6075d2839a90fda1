"""Which device a request must go to because of the regions it names. Told by the supervisor, asked by the submitter.

Empty unless there are several GPU workers and clients have registered CUDA regions: everything else is on every worker.
"""

from __future__ import annotations

from shm.control_records import RegionPlace
from shm.errors import InvalidArgument
from shm.messages import RegionSlice, Submit


class RegionPlaces:
    """Region name -> device name, of one front."""

    def __init__(self) -> None:
        self._devices: dict[str, str] = {}

    def update(self, place: RegionPlace) -> None:
        """A region came or went."""
        if place.device:
            self._devices[place.region] = place.device
        else:
            self._devices.pop(place.region, None)

    def __bool__(self) -> bool:
        return bool(self._devices)

    def device_of(self, submit: Submit) -> str:
        """The only device whose worker has every region that the request names; "": any will do.

        Raises: InvalidArgument: it names regions of two GPUs.
        """
        found, first = "", ""
        for name in _regions(submit):
            device = self._devices.get(name, "")
            if device and found and device != found:
                raise InvalidArgument(
                    f"shared memory region '{first}' is on GPU {_index(found)} and region '{name}' on GPU {_index(device)}; "
                    "a request can use regions of one GPU only"
                )
            if device and not found:
                found, first = device, name
        return found

    def __repr__(self) -> str:
        return f"<RegionPlaces {len(self._devices)} regions>"


def _regions(submit: Submit) -> list[str]:
    inputs = [tensor.place.region for tensor in submit.inputs if isinstance(tensor.place, RegionSlice)]
    return inputs + [output.region.region for output in submit.outputs if output.region is not None]


def _index(device: str) -> str:
    return device.removeprefix("cuda:")
