"""KServe's package, imported beside tritonclient's: both bring the messages of package ``inference``, and one descriptor pool
takes them once. So this one is imported with a pool of its own; whoever needs it imports it from here.
"""

from __future__ import annotations

from unittest import mock

from google.protobuf import descriptor_pool

with mock.patch.object(descriptor_pool, "Default", return_value=descriptor_pool.DescriptorPool()):
    from kserve import (
        InferenceGRPCClient,
        InferenceRESTClient,
        InferInput,
        InferRequest,
        InferResponse,
        RESTConfig,
    )
    from kserve.protocol.infer_type import RequestedOutput

__all__ = [
    "InferInput",
    "InferRequest",
    "InferResponse",
    "InferenceGRPCClient",
    "InferenceRESTClient",
    "RESTConfig",
    "RequestedOutput",
]
