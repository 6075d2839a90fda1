"""The messages of grpc/health/v1/health.proto: their types are in the stub that `make lint` writes."""

from tensord.protocol import pool

pool.define(globals())
