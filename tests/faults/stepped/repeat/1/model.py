"""Declares ``repeat`` of ``bench/models`` as a stepped model: base + 0, base + 1, ..., then an end without outputs."""

import jax.numpy as jnp

inputs = {"base": "FP32[16]", "count": "INT32[1]"}
outputs = {"value": "FP32[16]"}
slots = 64
max_steps = 4096
inserts_per_step = 16


def create(path, config, device):
    def init(params, slots):
        return {"base": jnp.zeros((slots, 16)), "at": jnp.zeros(slots, jnp.int32), "count": jnp.zeros(slots, jnp.int32)}

    def insert(params, carry, slot, inputs):
        new = {"base": inputs["base"], "at": 0, "count": inputs["count"][0]}
        return {name: carry[name].at[slot].set(value) for name, value in new.items()}, {}

    def step(params, carry, active):
        at, count = carry["at"], carry["count"]
        value = carry["base"] + at[:, None].astype(jnp.float32)
        return carry | {"at": at + active}, {"value": value}, active & (at < count), active & (at >= count)

    return (init, insert, step), {}
