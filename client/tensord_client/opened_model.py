"""A model that a client has opened: the daemon's description, and the lanes to the workers that serve the model."""

from __future__ import annotations

import time
from typing import Any

from tensord_client.common.results import Description
from tensord_client.common.submission import least_busy
from tensord_client.worker_lane import ClientLane

#: Seconds in which a worker that refuses requests is not asked about again.
_JUST = 0.25


class OpenedModel:
    """Holds a model's description as the daemon gave it, of one version or the newest, and the lanes to its workers."""

    def __init__(self, description: Description, lanes: list[ClientLane], coming: int, opened_at: float) -> None:
        """Stores what the daemon answered when it was asked for the model.

        Args:
          lanes: the lanes to the workers that serve the model.
          coming: how many more workers will serve the model, but do not yet.
          opened_at: when the daemon answered, in seconds of ``time.monotonic()``.
        """
        self.description = description
        self.lanes = lanes
        self.coming = coming
        #: The only lane, if no other is to come.
        self.alone = lanes[0] if len(lanes) == 1 and not coming else None
        self.opened_at = opened_at
        #: Datatypes by name, of the inputs and of the outputs.
        self.datatypes: dict[str, str] = {each["name"]: each["datatype"] for each in description.metadata["inputs"]}
        self.outputs: dict[str, str] = {each["name"]: each["datatype"] for each in description.metadata["outputs"]}
        #: Encoded prepared requests of small tensors alone, by the names, dtypes and shapes of these (``placement``).
        self.small: dict[tuple[Any, ...], bytes] = {}

    @property
    def is_told(self) -> bool:
        """Returns whether the daemon has said only just which workers have the model."""
        return time.monotonic() - self.opened_at <= _JUST

    @property
    def lacks(self) -> bool:
        """Returns whether the daemon may give more lanes: a worker was to come, or one of several ended."""
        if self.coming:
            return True
        lanes = self.lanes
        # One that is alone, and has ended, is missed by the next request.
        return len(lanes) > 1 and not all(lane.usable for lane in lanes)

    def choose(self) -> ClientLane | None:
        """Returns the usable lane with the fewest requests in flight; None: all lanes have ended."""
        lanes = self.lanes
        if len(lanes) == 1:
            return lanes[0] if lanes[0].usable else None
        return least_busy([lane for lane in lanes if lane.usable])
