"""Defines what a client returns to its caller: descriptions of models, and answers to requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .arrays import Array as Array
from .scheduling import Parameter as Parameter
from .tensors import Tensor as Tensor
from .tensors import Tensors as Tensors
from .tensors import Timing as Timing
from .tensors import check_place as check_place


class Answer(dict):  # type: ignore[type-arg]
    """The answer to a request: output name -> array. Over a lane, large outputs are read-only views of the server's memory.

    The server cannot reuse this memory while the answer, an array of the answer, or any view of such an array exists.
    ``release()`` removes the outputs from such an answer, and so does the end of a ``with answer:`` block. ``version`` is the
    version of the model that answered. ``parameters`` maps names to further values that the server sent with the outputs.
    """

    #: The version of the model that answered.
    version: int = 0
    #: The parameters of the model's answer.
    parameters: Mapping[str, Parameter] = {}
    #: The fields of ``timing``, as they came.
    times: Sequence[int] | None = None
    #: The right to use the memory that outputs lie in, which ends with the last reference to it; None: they lie elsewhere.
    lease: Any = None

    @property
    def timing(self) -> Timing | None:
        """Returns how long the server queued and executed the request, and how many bytes it copied.

        Returns None if the server did not say.
        """
        return None if self.times is None else Timing(*self.times)

    @property
    def copied_bytes(self) -> int | None:
        """Returns how many bytes the server copied for the request, or None if the server did not say."""
        timing = self.timing
        return None if timing is None else timing.copied_bytes

    def release(self) -> None:
        """If outputs lie in the server's memory, removes all outputs from this answer and gives this memory back. Idempotent.

        If an array of the answer or a view of one still exists, the memory is given back once the last of them is
        garbage-collected.
        """
        if self.lease is not None:
            self.clear()
            self.lease = None

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Description:
    """The server's description of a model version, such as its metadata, its largest batch and whether it has sequences."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.model: str = answer["model"]
        #: The version that was asked for, or the newest ready one.
        self.version: int = answer["version"]
        #: V2 metadata of that version: name, versions, platform, inputs, outputs.
        self.metadata: dict[str, Any] = answer["metadata"]
        #: 0: the model has no batch dimension.
        self.max_batch_size: int = answer["max_batch_size"]
        #: True if a request has several responses.
        self.streams: bool = answer["streams"]
        #: True if requests belong to sequences.
        self.sequences: bool = answer["sequences"]
        #: True if running a request twice harms nobody.
        self.pure: bool = answer["pure"]
        #: in_flight, segments, segment_byte_size, response_byte_size; empty where there are none of a lane.
        self.limits: dict[str, int] = answer.get("limits", {})


def written(outputs: dict[str, Array], places: Mapping[str, Array]) -> dict[str, Array]:
    """Copies outputs to the caller's arrays in ``places``, by name. Returns ``outputs``, in which these arrays replace outputs.

    Raises: InvalidArgument: an array in ``places`` has another shape or dtype than the output of the same name.
    """
    for name, place in places.items():
        made = outputs.get(name)
        if made is None or made is place:
            continue
        check_place(name, made.shape, made.dtype, place)
        place[...] = made
        outputs[name] = place
    return outputs
