"""Serves a Keras 3 model on JAX: ``stateless_call`` is the function, its variables' values are the parameters."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras

inputs = {"x": "FP32[8]"}
outputs = {"y": "FP32[3]"}
max_batch_size = 8


def create(path, config, device):
    keras.utils.set_random_seed(0)
    # A trained one: keras.saving.load_model(path / "network.keras").
    network = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(3)])
    params = [[v.value for v in network.trainable_variables], [v.value for v in network.non_trainable_variables]]

    def apply(params, inputs):
        made, _ = network.stateless_call(*params, inputs["x"], training=False)
        return {"y": made}

    return apply, params
