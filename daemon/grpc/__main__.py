"""Runs the gRPC front process: ``python -m tensord.daemon.grpc``, which only the daemon's supervisor process starts."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Until the front serves: what is imported stays, and looking at it again and again is a tenth of the time (measured).
    gc.disable()
    from tensord.daemon.front import process
    from tensord.daemon.grpc.server import GrpcFront

    process.main("tensord.daemon.grpc", "The gRPC front. Started by the supervisor only.", GrpcFront)
