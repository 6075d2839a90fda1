"""The messages of model_config.proto: their types are in the stub that `make lint` writes."""

from tensord.protocol import pool

pool.define(globals())
