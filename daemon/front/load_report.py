"""Tells the load of a front and of the workers to a load balancer that asks with the header ``endpoint-load-metrics-format``.

    endpoint-load-metrics: TEXT application_utilization=0.5, named_metrics.in_flight=12
    endpoint-load-metrics: JSON {"application_utilization":0.5,"named_metrics":{"in_flight":12}}
    endpoint-load-metrics-bin: the message OrcaLoadReport in base64

The report is a header of an HTTP response, a trailer of a gRPC response. Source: Envoy's "Open Request Cost Aggregation", with
xds/data/orca/v3/orca_load_report.proto; Triton docs/protocol/extension_generate.md, "ORCA".
"""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tensord.daemon.submit.submitter import Submitter

#: The request's header, in lower case.
ASKED = "endpoint-load-metrics-format"
#: The values of the header; anything else asks for nothing.
FORMATS = frozenset(("text", "json", "bin"))
#: Field 9 of the message, a double; fields 1 and 2 of an entry of field 8, a map from string to double.
_APPLICATION_UTILIZATION, _NAMED_METRICS, _KEY, _VALUE = b"\x49", b"\x42", b"\x0a", b"\x11"


def asked(value: str) -> str:
    """Returns the format of the load report that a client asks for: "text", "json" or "bin", or "" if it asks for no report.

    ``value``: the value of the request header ``endpoint-load-metrics-format``.
    """
    wanted = value.strip().lower()
    return wanted if wanted in FORMATS else ""


def header(submitter: Submitter, wanted: str) -> tuple[bytes, bytes]:
    """Returns (name, value) of an HTTP header or trailer that says how many requests of ``submitter`` are in flight.

    It also says which fraction of the workers is busy. ``wanted``: the format of the value, "text", "json" or "bin".
    """
    in_flight, utilization = submitter.load
    if wanted == "text":
        value = f"TEXT application_utilization={utilization:.3f}, named_metrics.in_flight={in_flight}".encode()
    elif wanted == "json":
        report = {"application_utilization": round(utilization, 3), "named_metrics": {"in_flight": in_flight}}
        value = b"JSON " + msgspec.json.encode(report)
    else:
        return b"endpoint-load-metrics-bin", base64.b64encode(_message(in_flight, utilization)).rstrip(b"=")
    return b"endpoint-load-metrics", value


def _message(in_flight: int, utilization: float) -> bytes:
    name = b"in_flight"
    entry = _KEY + bytes((len(name),)) + name + _VALUE + struct.pack("<d", in_flight)
    return _NAMED_METRICS + bytes((len(entry),)) + entry + _APPLICATION_UTILIZATION + struct.pack("<d", utilization)
