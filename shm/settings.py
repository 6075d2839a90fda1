"""The operations that change what holds for the whole daemon while it runs: its log and its traces."""

from __future__ import annotations

from tensord.shm.record import Record


class ChangeLog(Record, frozen=True, tag="c.log"):
    """Changes the log settings that are not None. Reply: JSON, all settings then in force."""

    info: bool | None = None
    warning: bool | None = None
    error: bool | None = None
    verbose: int | None = None
    format: str | None = None


class ChangeTrace(Record, frozen=True, tag="c.trace"):
    """Changes the trace settings of a model, or of all (""), that are not None, and forgets its own values for ``cleared``.

    Reply: JSON, the settings then in force there. Fields as in TraceChanged; ``count`` is -1 for no limit.
    """

    model: str = ""
    level: int | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None
    cleared: tuple[str, ...] = ()
