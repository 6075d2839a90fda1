"""Forms: what requests, or answers, of one kind have in common, said once on a lane and not with each of them.

    submitter                                                          worker
    RequestForm 7: model, names, datatypes, shapes, regions   ──▶      what was found when the first one was validated
    FormSubmit 7: id, bytes   FormSubmit 7: id, slice   ...   ──▶      ids, moments, priority, timeout, sequence: its own
                                                       ◀──      AnswerForm 3: names, datatypes, shapes, regions
                                                       ◀──      FormCompletion 3: id, bytes   ...

A client asks the same again and again, with other tensors. Those that lie in no region are in the record or, if they are large,
in an arena, and the record says where; in a template ``Inline(b"")`` stands for each. Whoever sends numbers its forms, and after
``MAX_FORMS`` begins again at 0; a lane is told a form whenever its number last stood for another one. Records are read in the
order in which they were sent, so a number means what was said of it last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from tensord.shm.channel import Channel
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import (
    Completion,
    Content,
    FormCompletion,
    FormSubmit,
    Inline,
    RegionSlice,
    Slice,
    Submit,
    Tensor,
)
from tensord.shm.record import Record, encoder

#: Forms of one sender that have a number at the same time.
MAX_FORMS = 1024
_EMPTY = Inline(b"")

T = TypeVar("T", Submit, Completion)
R = TypeVar("R")


class Form(Generic[T]):
    """One kind. Two of them may have the same number, one after the other: what tells them apart is the object."""

    __slots__ = ("number", "template")

    def __init__(self, number: int, template: T) -> None:
        self.number = number
        #: A record of that kind without what each has of its own.
        self.template: T = template

    def __repr__(self) -> str:
        return f"<Form {self.number} of {type(self.template).__name__}>"


#: Forms that have a number now, and those that were forgotten for the last of them.
OnMint = Callable[[int, int], object]


class Forms(Generic[T]):
    """The forms of one sender: equal templates are one form."""

    def __init__(self, on_mint: OnMint | None = None, count: int = MAX_FORMS) -> None:
        """``count``: so many have a number at the same time; 0: none that may be told whole."""
        self._on_mint = on_mint
        self._count = count
        self._known: dict[bytes, Form[T]] = {}
        #: Templates that came once so far.
        self._once: set[bytes] = set()
        self._next = 0
        #: Forms that were numbered, and those that were forgotten since.
        self.minted = 0
        self.evicted = 0

    def form(self, template: T) -> Form[T]:
        """Numbers a template; see ``request_template`` and ``answer_template``."""
        key = encoder.encode(template)
        return self._known.get(key) or self._mint(key, template)

    def form_again(self, template: T) -> Form[T] | None:
        """Numbers a template that came before; None: it came for the first time, and many never come again."""
        key = encoder.encode(template)
        form = self._known.get(key)
        if form is not None:
            return form
        if key not in self._once:
            if len(self._once) >= self._count:
                self._once.clear()
            if self._count:
                self._once.add(key)
            return None
        self._once.discard(key)
        return self._mint(key, template)

    def _mint(self, key: bytes, template: T) -> Form[T]:
        evicted = 0
        if len(self._known) >= max(1, self._count):
            evicted = len(self._known)
            self.evicted += evicted
            self._known.clear()
        form = self._known[key] = Form(self._next, template)
        self._next = (self._next + 1) % MAX_FORMS
        self.minted += 1
        if self._on_mint is not None:
            self._on_mint(len(self._known), evicted)
        return form

    def __repr__(self) -> str:
        return f"<Forms {len(self._known)}, {self.minted} minted, {self.evicted} evicted>"


class SaidForms(set[Form[T]]):
    """What the other end of a lane was told: the forms whose numbers stand for them there."""

    def __init__(self, channel: Channel, record: Callable[[int, T], Record]) -> None:
        """``record``: RequestForm or AnswerForm."""
        self._channel = channel
        self._record: Callable[[int, T], Record] = record
        self._numbers: dict[int, Form[T]] = {}
        #: How often a number came to stand for another form.
        self.renumbered = 0

    def say(self, form: Form[T]) -> None:
        """Before a record of the form: queues what it is, unless it is in here."""
        if form in self:
            return
        self._channel.put(self._record(form.number, form.template))
        former = self._numbers.get(form.number)
        if former is not None:
            self.discard(former)
            self.renumbered += 1
        self._numbers[form.number] = form
        self.add(form)


class HeardForms(dict[int, R]):
    """What the other end of a lane told, as its reader has understood it: by number."""

    __slots__ = ()

    def learn(self, number: int, form: R) -> None:
        """Raises InvalidArgument: no sender numbers like that."""
        if not 0 <= number < MAX_FORMS:
            raise InvalidArgument(f"form {number} was told, forms have numbers below {MAX_FORMS}")
        self[number] = form

    def find(self, number: int) -> R:
        """As ``[number]``. Raises InvalidArgument: nothing was said of it."""
        return self[number]

    def __missing__(self, number: int) -> R:
        raise InvalidArgument(f"form {number} was never told")


def request_template(submit: Submit) -> Submit:
    """What a request has in common with others of its kind."""
    return Submit(
        0,
        submit.model,
        submit.version,
        _emptied(submit.inputs),
        submit.outputs,
        submit.parameters,
        strikes=submit.strikes,
    )


def answer_template(completion: Completion) -> Completion:
    """What an answer has in common with others of its kind."""
    return msgspec.structs.replace(completion, request_id=0, outputs=_emptied(completion.outputs), lease=None)


def whole_request(template: Submit, record: FormSubmit) -> Submit:
    """A request of a form, as if it had been sent whole. Raises InvalidArgument: it has too many tensors, or too few."""
    return msgspec.structs.replace(
        template,
        request_id=record.request_id,
        inputs=_filled(template.inputs, record.contents),
        client_id=record.client_id,
        deadline_ns=record.deadline_ns,
        received_ns=record.received_ns,
        priority=record.priority,
        timeout_us=record.timeout_us,
        sequence_id=record.sequence_id,
        sequence_start=record.sequence_start,
        sequence_end=record.sequence_end,
        trace=record.trace,
    )


def whole_answer(template: Completion, record: FormCompletion) -> Completion:
    """An answer of a form, as if it had been sent whole. Raises InvalidArgument: it has too many tensors, or too few."""
    return msgspec.structs.replace(
        template,
        request_id=record.request_id,
        outputs=_filled(template.outputs, record.contents),
        lease=record.lease,
    )


def no_view(place: Slice) -> memoryview:
    """The view of answers without a lease."""
    raise AssertionError(f"{place} in an answer without a lease")


def own_contents(tensors: tuple[Tensor, ...]) -> tuple[Content, ...]:
    """What a record of their form says of them."""
    places = [tensor.place for tensor in tensors]
    return tuple(
        [place.content if type(place) is Inline else place for place in places if type(place) is not RegionSlice]  # type: ignore[misc]
    )


def own_count(tensors: tuple[Tensor, ...]) -> int:
    """How many of a template's tensors a record has of its own."""
    return sum([type(tensor.place) is Inline for tensor in tensors])


def _emptied(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        [
            tensor if type(tensor.place) is RegionSlice else Tensor(tensor.name, tensor.datatype, tensor.shape, _EMPTY)
            for tensor in tensors
        ]
    )


def _filled(tensors: tuple[Tensor, ...], contents: tuple[Content, ...]) -> tuple[Tensor, ...]:
    own = own_count(tensors)
    if own != len(contents):
        raise InvalidArgument(f"{len(contents)} tensors came in a record whose form has {own} there")
    rest = iter(contents)
    filled: list[Tensor] = []
    for tensor in tensors:
        if type(tensor.place) is Inline:
            content = next(rest)
            place = content if type(content) is Slice else Inline(content)  # type: ignore[arg-type]
            tensor = Tensor(tensor.name, tensor.datatype, tensor.shape, place)
        filled.append(tensor)
    return tuple(filled)
