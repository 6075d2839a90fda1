"""The messages of grpc_service.proto: their types are in the stub that `make lint` writes."""

from tensord.protocol import model_config_pb2, pool  # noqa: F401  # whose messages this file uses

pool.define(globals())
