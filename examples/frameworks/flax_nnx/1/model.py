"""Serves a Flax NNX module: ``nnx.split`` takes its arrays out, ``nnx.merge`` puts them back where it is called."""

from flax import nnx

inputs = {"x": "FP32[8]"}
outputs = {"y": "FP32[3]"}
max_batch_size = 8


class Network(nnx.Module):
    """A network of two layers, with dropout between them that is off while serving."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(32, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x))))


def create(path, config, device):
    network = Network(nnx.Rngs(0))
    network.eval()
    # Trained parameters: an Orbax checkpoint, tensord.models.load(path / "params"), by nnx.update(network, ...).
    graph, params, rest = nnx.split(network, nnx.Param, ...)
    return (lambda params, inputs: {"y": nnx.merge(graph, params, rest)(inputs["x"])}), params
