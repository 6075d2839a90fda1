"""The life of the daemon, as its supervisor counts it."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where the daemon is in its life."""

    #: Not all first loads are settled.
    STARTING = "starting"
    #: It serves.
    SERVING = "serving"
    #: The fronts finish what they accepted; workers are still replaced for it.
    DRAINING = "draining"
    #: Everything is told to exit.
    STOPPING = "stopping"
