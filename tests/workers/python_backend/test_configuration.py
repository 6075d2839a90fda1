"""The configuration as a Triton Python model reads and completes it."""

from __future__ import annotations

import pytest

from tensord.workers.python_backend import configuration


def test_configuration_completed_by_the_model() -> None:
    config = configuration.ModelConfig({"name": "m", "input": [{"name": "x", "data_type": "TYPE_INVALID", "dims": []}]})
    config.set_max_batch_size(4)
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [3]})
    config.add_input({"name": "w", "data_type": "TYPE_FP32", "dims": [1], "optional": True})
    config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [3]})
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": False})
    assert config.as_dict() == {
        "name": "m",
        "max_batch_size": 4,
        "input": [
            {"name": "x", "data_type": "TYPE_FP32", "dims": [3]},
            {"name": "w", "data_type": "TYPE_FP32", "dims": [1], "optional": True},
        ],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": False},
    }
    found = config.as_dict()
    assert configuration.get_input_config_by_name(found, "w")["dims"] == [1]
    assert configuration.get_output_config_by_name(found, "z") is None
    assert not configuration.using_decoupled_model_transaction_policy(found)
    with pytest.raises(ValueError, match="dims is"):
        config.add_input({"name": "x", "dims": [4]})
    with pytest.raises(ValueError, match="unknown properties: shape"):
        config.add_input({"name": "x", "shape": [4]})
    with pytest.raises(ValueError, match="max_batch_size 4"):
        config.set_max_batch_size(8)
    with pytest.raises(ValueError, match="unknown model transaction policy"):
        config.set_model_transaction_policy({"x": 1})
