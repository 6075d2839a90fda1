"""Runs a program with state on requests whose inputs are already gathered; reuses its arguments from run to run.

Used by ``tensord.workers.dispatch.sequence_runs``, which reads the outputs of each batch before the next batch begins.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tensord.workers.programs.carry import Carry
from tensord.workers.programs.executable import Content, Executable
from tensord.workers.programs.gather_buffer import aligned
from tensord.workers.programs.state_program import rows_argument
from tensord.workers.tensors.signature import Signature


class GatheredRun:
    """Runs one program of a model with sequence state, a batch with each call, on inputs that were put into the program's memory.

    Used only by the thread that runs the instance's batches, which also uses its carry (the state of its sequences).
    """

    def __init__(self, executable: Executable, carry: Carry, signature: Signature) -> None:
        self._executable = executable
        self._carry = carry
        self._nobody = rows_argument(signature, executable.rows, ())
        self._rows = aligned(self._nobody.shape, self._nobody.dtype)
        self._rows[...] = self._nobody
        #: How many rows belonged to sequences in the last run.
        self._used = 0

    def __call__(self, slots: Sequence[int], starts: Sequence[bool]) -> list[Content]:
        """Runs the batch whose inputs lie in the executable's ``memory``. Returns the contents of the outputs in host memory.

        Args:
          slots: the slot of the sequence of each of the first rows; no request fills the other rows.
          starts: whether each of these sequences begins.
        Raises StateLost: the run failed, or reading its outputs did, and the state of all sequences is lost. After any other
          error, of the run or of sending the inputs, all state is as before.
        """
        rows, used = self._rows, len(slots)
        rows[0, :used] = slots
        rows[1, :used] = starts
        if used < self._used:
            rows[:, used : self._used] = self._nobody[:, used : self._used]
        self._used = used
        executable = self._executable
        step = functools.partial(executable.call, executable.parameters())
        made = self._carry.run_rows(step, executable.arguments(), rows)
        try:
            return executable.read(made)
        except BaseException as error:
            raise self._carry.failed() from error

    def __repr__(self) -> str:
        return f"<GatheredRun {self._executable.wanted}>"
