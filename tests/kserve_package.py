"""KServe's package, imported beside tritonclient's: both bring the messages of package ``inference``, and one descriptor pool
takes them once. So this one is imported with a pool of its own; whoever needs it asks for its names here.

It takes a second, in each process that collects tests: only who asks for a name imports it.
"""

from __future__ import annotations

import functools
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
