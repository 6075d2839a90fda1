"""Imports KServe's package beside tritonclient's.

Both bring the messages of package ``inference``, and one descriptor pool takes them only once, so KServe's is imported with a
pool of its own; tests get its names from this module. That takes a second in each process that collects tests, so it is imported
only when a name is asked for.
"""

from __future__ import annotations

import functools
import re
from types import ModuleType
from typing import Any
from unittest import mock

from google.protobuf import descriptor_pool

#: What pytest looks for in every module that it sees is none of them.
_NAMES = (
    "InferenceGRPCClient",
    "InferenceRESTClient",
    "InferInput",
    "InferRequest",
    "InferResponse",
    "RequestedOutput",
    "RESTConfig",
)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(name)
    return getattr(_kserve(), name)


@functools.cache
def _kserve() -> ModuleType:
    with mock.patch.object(descriptor_pool, "Default", return_value=descriptor_pool.DescriptorPool()):
        import kserve
        from kserve.protocol.infer_type import RequestedOutput

    kserve.RequestedOutput = RequestedOutput
    return kserve


def strange_fields(document: dict[str, Any], kind: str, place: str = "") -> list[str]:
    """Returns the fields of a document that KServe's model of a kind ("V1beta1InferenceService") does not know.

    What lies in fields whose kinds are Kubernetes' own is not looked at.
    """
    model = getattr(_kserve().models, kind, None)
    if model is None:
        return []
    types = {written: model.openapi_types[name] for name, written in model.attribute_map.items()}
    found = []
    for field, value in document.items():
        if field not in types:
            found.append(f"{place}{field}")
        elif (several := re.fullmatch(r"list\[(\w+)\]", types[field])) is not None:
            for number, each in enumerate(value):
                if isinstance(each, dict):
                    found += strange_fields(each, several[1], f"{place}{field}[{number}].")
        elif isinstance(value, dict):
            found += strange_fields(value, types[field], f"{place}{field}.")
    return found
