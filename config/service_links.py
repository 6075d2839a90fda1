"""Variables that are not the operator's: container platforms describe their services in every container, in capitals.

For a service named ``tensord`` Kubernetes sets ``TENSORD_SERVICE_HOST``, ``TENSORD_PORT=tcp://...`` and more; for one named
``tensord-http`` ``TENSORD_HTTP_PORT=tcp://...``, which is also the name of a key. So the values tell as well: no key that ends in
PORT takes a URL.
Source: Kubernetes "Accessing the Service", environment variables; Docker "Legacy container links".
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

#: Of a service's first port; a plain number there is the operator's mistake.
_URL = re.compile(r"(tcp|udp|sctp)://\S+", re.ASCII)
_OF_A_SERVICE = re.compile(r"[A-Z0-9_]+_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)", re.ASCII)
_OF_A_PORT = re.compile(r"[A-Z0-9_]+_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?", re.ASCII)
#: ``/container/alias``, and the other container's own variables, which only come along with it.
_ALIAS = re.compile(r"/[^/\s]+/[^/\s]+")
_SHOWN = 3


def names(environment: Mapping[str, str], prefix: str, keys: Container[str]) -> frozenset[str]:
    """Those of the variables with that prefix that describe a service. ``keys``: what stands for keys of ours."""
    ours = {name: value for name, value in environment.items() if name.startswith(prefix)}
    aliases = {
        name for name, value in ours.items() if name.endswith("_NAME") and name not in keys and _ALIAS.fullmatch(value)
    }
    linked = tuple(name.removesuffix("NAME") + "ENV_" for name in aliases)
    return frozenset(
        name for name, value in ours.items() if name in aliases or name.startswith(linked) or _describes(name, value)
    )


def _describes(name: str, value: str) -> bool:
    if name.endswith("_PORT") and _URL.fullmatch(value):
        return True
    return bool(_OF_A_SERVICE.fullmatch(name) or _OF_A_PORT.fullmatch(name))


def sentence(ignored: frozenset[str]) -> str:
    """For the log."""
    shown = ", ".join(sorted(ignored)[:_SHOWN]) + (", ..." if len(ignored) > _SHOWN else "")
    return f"environment: not read as configuration, because the container platform set it for a service: {shown}"
