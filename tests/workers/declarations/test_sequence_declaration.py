"""Tests what a model is told of the sequence of a request."""

from __future__ import annotations

from tensord.config.model_config import parse_pbtxt
from tensord.workers.declarations.sequence_declaration import control_inputs
from tensord.workers.scheduling.sequence import Controls

CORRID = """
    name: "m" sequence_batching {
        control_input { name: "I" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
        control_input { name: "N" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
    }
"""


def test_an_id_that_is_no_utf8_is_told_as_far_as_it_is() -> None:
    """A model that calls others may have made one of what it was given."""
    found = control_inputs(parse_pbtxt(CORRID, "m")).arrays(Controls("a\ud800", True, False))
    assert found["I"].tolist() == [b"a?"]
    assert int(found["N"][0]).to_bytes(8, "little") == b"\2\0\0\0a?\0\0"
