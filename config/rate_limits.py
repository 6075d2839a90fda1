"""Parses ``NAME:COUNT`` and ``NAME:COUNT:DEVICE``: amounts of the rate limiter's resources, which model instances share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from tensord.config.options import RateLimit

#: The largest count that ModelConfig holds.
_MAX_COUNT = (1 << 32) - 1
_LIMIT = re.compile(r"([^:]+):([0-9]{1,10})(?::([0-9]{1,4}))?", re.ASCII)


class Limit(NamedTuple):
    """The operator's limit for one resource of the rate limiter, on one GPU or on each device.

    The limit says how much of the resource model instances may hold at the same time.
    """

    #: The name in lower case: names that differ in case only are one.
    name: str
    amount: int
    #: The only GPU that it is for; None: for each device, or altogether where a model calls the resource global.
    device: int | None


def parse(texts: Iterable[str]) -> tuple[Limit, ...]:
    """Parses amounts of resources, ``NAME:COUNT`` or ``NAME:COUNT:DEVICE``. Raises ValueError if a text has another form."""
    limits: list[Limit] = []
    for text in texts:
        match = _LIMIT.fullmatch(text)
        if match is None or int(match[2]) > _MAX_COUNT:
            raise ValueError(f"expected NAME:COUNT or NAME:COUNT:DEVICE, given {text[:100]!r}")
        limits.append(Limit(match[1].lower(), int(match[2]), None if match[3] is None else int(match[3])))
    return tuple(limits)


def limits(options: RateLimit, gpu: int | None) -> dict[str, int] | None:
    """Returns the amount of each rate-limiter resource on the GPU ``gpu``, by name. Returns None if rate limiting is off.

    If ``gpu`` is None, the worker runs on the CPU, and the amounts of GPU 0 are returned.
    """
    return None if options.mode == "off" else of_device(parse(options.resources), gpu or 0)


def of_device(limits: Iterable[Limit], device: int) -> dict[str, int]:
    """Returns the amounts of resources on ``device`` by name. A limit for this device overrides a limit for all devices."""
    found: dict[str, int] = {}
    for limit in sorted(limits, key=lambda limit: limit.device is not None):
        if limit.device in (None, device):
            found[limit.name] = limit.amount
    return found
