"""Reads how a model's configuration treats sequences: how many run at a time, when they share a batch, when they end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensord.config.model_config import ModelConfig
from tensord.workers.declarations.control_inputs import ControlInputs, control_inputs
from tensord.workers.scheduling.dynamic_batcher import BatchRules
from tensord.workers.scheduling.sequence import IterativeIds
from tensord.workers.scheduling.sequence_batcher import DirectBatcher, DirectRules, OldestBatcher, Strategy
from tensord.workers.scheduling.sequence_table import SequenceRules


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What one model version's configuration says about sequences: limits, control inputs, and how instances batch them."""

    rules: SequenceRules
    controls: ControlInputs
    #: Strategy "direct": the row of a sequence in a batch is the number of its slot.
    direct: bool
    #: Makes the strategy of one instance.
    strategy: Callable[[], Strategy[Any]]
    #: Gives out ids, of a model that may send requests round again.
    iterative: IterativeIds | None


def sequence_plan(message: ModelConfig, max_waiting: int) -> SequencePlan | None:
    """Returns what a completed configuration says about sequences; None: the model has no sequences.

    ``max_waiting``: how many requests may wait.
    """
    if not message.HasField("sequence_batching"):
        return None
    sequences, rows = message.sequence_batching, max(1, message.max_batch_size)
    direct = not sequences.HasField("oldest")
    slots = rows if direct else sequences.oldest.max_candidate_sequences or rows
    rules = SequenceRules(
        slots, sequences.max_sequence_idle_microseconds * 1000, max_waiting, bool(sequences.iterative_sequence)
    )
    iterative = IterativeIds() if rules.iterative else None
    if direct:
        # Rounded, because the utilization is a 32-bit float: 0.1 of ten slots is one.
        enough = math.ceil(round(sequences.direct.minimum_slot_utilization * slots, 4))
        direct_rules = DirectRules(slots, sequences.direct.max_queue_delay_microseconds * 1000, enough)
        return SequencePlan(rules, control_inputs(message), direct, lambda: DirectBatcher(direct_rules), iterative)
    preferred = tuple(sorted(set(sequences.oldest.preferred_batch_size)))
    batching = BatchRules(
        rows, sequences.oldest.max_queue_delay_microseconds * 1000, preferred, joins=message.max_batch_size > 0
    )
    return SequencePlan(rules, control_inputs(message), direct, lambda: OldestBatcher(batching), iterative)
