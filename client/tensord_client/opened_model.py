"""A model that was opened: what the daemon said of it, and the lanes to the workers that have it."""

from __future__ import annotations

from tensord_client.results import Description
from tensord_client.worker_lane import WorkerLane


class OpenedModel:
    """A model version, or a model's newest version, as it was opened last."""

    def __init__(self, description: Description, lanes: list[WorkerLane], coming: int, opened_at: float) -> None:
        """``coming``: workers that are to have it and do not yet. ``opened_at``: monotonic seconds."""
        self.description = description
        self.lanes = lanes
        self.coming = coming
        self.opened_at = opened_at
        #: Datatypes of the inputs by name, and the names of the outputs.
        self.datatypes: dict[str, str] = {each["name"]: each["datatype"] for each in description.metadata["inputs"]}
        self.output_names: list[str] = [each["name"] for each in description.metadata["outputs"]]

    @property
    def lacks(self) -> bool:
        """Returns whether there should be more lanes than there are."""
        if self.coming:
            return True
        lanes = self.lanes
        # One that is alone, and has ended, is missed by the next request.
        return len(lanes) > 1 and not all(lane.usable for lane in lanes)

    def choose(self) -> WorkerLane | None:
        """Returns the lane with the fewest requests in flight; None: all have ended."""
        lanes = self.lanes
        if len(lanes) == 1:
            return lanes[0] if lanes[0].usable else None
        best = None
        for lane in lanes:
            if lane.usable and (best is None or len(lane.in_flight) < len(best.in_flight)):
                best = lane
        return best
