"""The messages of grpc/reflection/v1/reflection.proto: their types are in the stub that `make lint` writes."""

from tensord.protocol import pool

pool.define(globals())
