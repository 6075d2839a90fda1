"""What each of several fronts gets of the limits that hold for all of a protocol's requests together. Pure.

Each front keeps its own part without asking the others: connections are shared out evenly, and most of what is bounded here comes
with them. A part is never so small that the largest single request would not fit. docs/configuration.md lists every limit.
"""

from __future__ import annotations

import msgspec

from tensord.config.options import Options


def of_one(options: Options, protocol: str) -> Options:
    """The options for one of the fronts that speak ``protocol``, "http" or "grpc"."""
    http, grpc = options.http, options.grpc
    count = (http if protocol == "http" else grpc).processes
    if count == 1:
        return options
    replace = msgspec.structs.replace
    return replace(
        options,
        requests=replace(options.requests, max_in_flight=_part(options.requests.max_in_flight, count, 1)),
        http=replace(http, max_collected_byte_size=_part(http.max_collected_byte_size, count, http.max_body_byte_size)),
        grpc=replace(
            grpc, max_receiving_byte_size=_part(grpc.max_receiving_byte_size, count, grpc.max_message_byte_size)
        ),
    )


def _part(total: int, count: int, least: int) -> int:
    return min(total, max(-(-total // count), least))
