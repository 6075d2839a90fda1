"""Lets a model read and complete its configuration: part of ``triton_python_backend_utils`` (see ``interface``).

Source: triton-inference-server/python_backend, README.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


class ModelConfig:
    """A model's configuration as JSON, which the model's ``auto_complete_config`` may complete but not contradict."""

    def __init__(self, model_config: Mapping[str, Any] | str) -> None:
        self._config: dict[str, Any] = json.loads(model_config) if isinstance(model_config, str) else dict(model_config)

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets max_batch_size, or checks it: if one is configured that value stays, and only 0 or the same value is accepted.

        Raises ValueError: another value is configured.
        """
        given = self._config.get("max_batch_size", 0)
        if given and max_batch_size and given != max_batch_size:
            raise ValueError(f"configuration specified max_batch_size {given}, the model set {max_batch_size}")
        self._config["max_batch_size"] = given or max_batch_size

    def set_dynamic_batching(self) -> None:
        """Adds ``dynamic_batching`` to the configuration, unless it has a scheduler (dynamic, sequence or ensemble) already."""
        if not {"dynamic_batching", "sequence_batching", "ensemble_scheduling"} & self._config.keys():
            self._config["dynamic_batching"] = {}

    def set_model_transaction_policy(self, transaction_policy: Mapping[str, Any]) -> None:
        unknown = transaction_policy.keys() - {"decoupled"}
        if unknown:
            raise ValueError(f"unknown model transaction policy properties: {', '.join(sorted(unknown))}")
        self._config["model_transaction_policy"] = {"decoupled": bool(transaction_policy.get("decoupled"))}

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add("input", tensor, {"name", "data_type", "dims", "optional"})

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add("output", tensor, {"name", "data_type", "dims"})

    def _add(self, kind: str, tensor: Mapping[str, Any], known: set[str]) -> None:
        if tensor.keys() - known:
            raise ValueError(f"{kind} tensor has unknown properties: {', '.join(sorted(tensor.keys() - known))}")
        if "name" not in tensor:
            raise ValueError(f"{kind} tensor needs a name")
        tensors: list[dict[str, Any]] = self._config.setdefault(kind, [])
        for given in tensors:
            if given["name"] != tensor["name"]:
                continue
            for property in ("data_type", "dims"):
                wanted = tensor.get(property)
                said = given.get(property)
                if wanted and said and said != "TYPE_INVALID" and said != wanted:
                    raise ValueError(
                        f"unable to add {kind} '{tensor['name']}': {property} is {said} in the configuration, "
                        f"{wanted} in the model"
                    )
                given[property] = wanted or said
            return
        tensors.append({"dims": [], **tensor})


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Returns the entry of ``model_config["input"]`` with this name, or None."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Returns the entry of ``model_config["output"]`` with this name, or None."""
    return _named(model_config.get("output", ()), name)


def _named(tensors: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
