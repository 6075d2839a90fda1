"""Serves a PyTorch module by torchax: ``extract_jax`` makes a JAX function of it, and arrays of its parameters and buffers."""

import torch
import torchax

inputs = {"x": "FP32[8]"}
outputs = {"y": "FP32[3]"}
max_batch_size = 8


def create(path, config, device):
    torch.manual_seed(0)
    # Trained parameters: network.load_state_dict(torch.load(path / "network.pt", weights_only=True)).
    network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)).eval()
    params, function = torchax.extract_jax(network)
    return (lambda params, inputs: {"y": function(params, (inputs["x"],))}), params
