"""Compares the outputs of a Triton Python model with its configuration.

Triton sends an output as the model returns it, whatever the configuration says. So does this module, and warns of a difference
once for each version; with the model's parameter ``strict_outputs`` an output of another datatype or shape is an error.
"""

from __future__ import annotations

import logging
import threading

import numpy as np

from tensord.config.model_checks import STRICT_OUTPUTS
from tensord.config.model_config import ModelConfig, wants
from tensord.shm.arrays import Array, datatype_of
from tensord.shm.errors import Internal
from tensord.workers.programs.lowering import check_output
from tensord.workers.tensors.signature import Signature, TensorSpec

_log = logging.getLogger(__name__)


class DeclaredOutputs:
    """Checks the outputs that a version computes against its configuration, and reshapes them as clients expect them.

    The version's instances share one object. A difference is logged once, or is an error with ``strict_outputs``.
    """

    def __init__(self, message: ModelConfig, signature: Signature) -> None:
        """Reads the model's parameter ``strict_outputs``. Raises InvalidArgument: its value is no boolean."""
        self._signature = signature
        self._strict = wants(message, STRICT_OUTPUTS)
        self._lock = threading.Lock()
        self._warned = False

    def fit(self, name: str, array: Array, rows: int) -> Array:
        """Returns an output in the client's shape; or, if its dimensions are not as declared, unchanged, and logs this once.

        ``rows``: the rows of its request. Raises Internal: the output is not as declared and ``strict_outputs`` is set.
        """
        spec = self._signature.outputs[name]
        if spec.datatype == "BYTES" and datatype_of(array.dtype) == "BYTES":
            array = array.astype(np.object_, copy=False)
        elif self._strict and array.dtype != spec.dtype and array.dtype.kind in "iu" and spec.dtype.kind in "iu":
            # Integers that numpy made wider on the way (``np.array([0])``) are what was declared, where all of them fit.
            as_declared = array.astype(spec.dtype)
            array = as_declared if np.array_equal(as_declared, array) else array
        try:
            check_output(self._signature.model, spec, self._signature.batches, rows, array.shape, array.dtype)
        except Internal as error:
            if self._strict:
                raise
            self._warn(error.message)
            if not self._has_dims(spec, array):
                return array
        return spec.for_client(array, self._signature.batches)

    def _has_dims(self, spec: TensorSpec, array: Array) -> bool:
        """Returns whether an output's dimensions, without the batch dimension, are as declared."""
        lead = int(self._signature.batches)
        return len(array.shape) >= lead and spec.fits_model(array.shape[lead:])

    def _warn(self, why: str) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            _log.warning(
                "%s; it is sent as it is, as Triton does. Mend the configuration, or let the parameter %s refuse it",
                why,
                STRICT_OUTPUTS,
            )
