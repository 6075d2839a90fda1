"""What is said once and what is said each time are together the whole record; a number means what was said of it last."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.channel import Channel, pair
from tensord.shm.errors import InvalidArgument
from tensord.shm.forms import (
    MAX_FORMS,
    Form,
    Forms,
    HeardForms,
    SaidForms,
    answer_template,
    request_template,
    whole_answer,
    whole_request,
)
from tensord.shm.messages import (
    Completion,
    Content,
    FormCompletion,
    FormSubmit,
    Inline,
    RegionSlice,
    RequestedOutput,
    RequestForm,
    Slice,
    Submit,
    Tensor,
    ToWorker,
)
from tensord.shm.record import decoder, encoder

NUMBERS = st.integers(0, (1 << 63) - 1)
NAMES = st.text(max_size=4)
REGIONS = st.builds(RegionSlice, NAMES, NUMBERS, NUMBERS)
PARAMETERS = st.dictionaries(
    NAMES,
    st.one_of(st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(allow_nan=False), NAMES),
    max_size=2,
)
TENSORS = st.lists(
    st.builds(
        Tensor,
        NAMES,
        NAMES,
        st.lists(NUMBERS, max_size=3).map(tuple),
        st.one_of(st.binary(max_size=9).map(Inline), REGIONS, st.builds(Slice, NUMBERS, NUMBERS, NUMBERS)),
    ),
    max_size=4,
).map(tuple)
SUBMITS = st.builds(
    Submit,
    NUMBERS,
    NAMES,
    NUMBERS,
    TENSORS,
    st.lists(st.builds(RequestedOutput, NAMES, st.none() | REGIONS, NUMBERS), max_size=2).map(tuple),
    PARAMETERS,
    NAMES,
    deadline_ns=NUMBERS,
    received_ns=NUMBERS,
    priority=NUMBERS,
    timeout_us=NUMBERS,
    sequence_id=st.one_of(NUMBERS, NAMES),
    sequence_start=st.booleans(),
    sequence_end=st.booleans(),
    trace=st.integers(0, 3),
)
COMPLETIONS = st.builds(
    Completion,
    NUMBERS,
    version=NUMBERS,
    outputs=TENSORS,
    lease=st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS),
    parameters=PARAMETERS,
    final=st.booleans(),
)


def contents_of(tensors: tuple[Tensor, ...]) -> tuple[Content, ...]:
    places = [tensor.place for tensor in tensors]
    return tuple(
        place.content if isinstance(place, Inline) else place for place in places if not isinstance(place, RegionSlice)
    )


def own_of(submit: Submit, number: int = 0) -> FormSubmit:
    """What a request has of its own."""
    given = {name: getattr(submit, name) for name in FormSubmit.__struct_fields__ if hasattr(submit, name)}
    return FormSubmit(form=number, contents=contents_of(submit.inputs), **given)


def sent(record: Any) -> Any:
    """As it is at the other end of a lane."""
    return msgspec.msgpack.decode(encoder.encode(record), type=type(record))


# ------------------------------------------------------------------------------------------------------- whole records


@given(SUBMITS)
def test_a_request_is_whole_again(submit: Submit) -> None:
    template, own = sent(request_template(submit)), sent(own_of(submit))
    assert whole_request(template, own) == submit


@given(COMPLETIONS)
def test_an_answer_is_whole_again(completion: Completion) -> None:
    template = sent(answer_template(completion))
    own = sent(FormCompletion(completion.request_id, 0, contents_of(completion.outputs), completion.lease))
    assert whole_answer(template, own) == completion


@given(SUBMITS, SUBMITS)
def test_what_is_a_request_s_own_is_not_in_its_template(submit: Submit, other: Submit) -> None:
    """Two that differ in nothing else are of one form; and no form is of two kinds."""
    own = {name: getattr(other, name) for name in FormSubmit.__struct_fields__ if hasattr(other, name)}
    tensors = tuple(
        tensor
        if isinstance(tensor.place, RegionSlice)
        else msgspec.structs.replace(
            tensor, place=Inline(tensor.place.content + b"+") if isinstance(tensor.place, Inline) else Inline(b"")
        )
        for tensor in submit.inputs
    )
    alike = msgspec.structs.replace(submit, inputs=tensors, **own)
    forms: Forms[Submit] = Forms()
    form = forms.form(request_template(submit))
    assert forms.form(request_template(alike)) is form
    template = request_template(other)
    if forms.form(template) is form:
        assert repr(template) == repr(request_template(submit))


def test_values_that_only_compare_equal_are_of_two_forms() -> None:
    forms: Forms[Submit] = Forms()
    kinds: list[Any] = [True, 1, 1.0, "1", 0.0, -0.0]
    made = [forms.form(request_template(Submit(1, "m", 0, (), parameters={"p": value}))) for value in kinds]
    assert len(set(made)) == len(kinds)
    for form, value in zip(made, kinds, strict=True):
        assert repr(sent(form.template).parameters["p"]) == repr(value)


@given(SUBMITS, st.lists(st.one_of(st.binary(max_size=3), st.builds(Slice, NUMBERS, NUMBERS, NUMBERS)), max_size=5))
def test_another_number_of_tensors_is_refused(submit: Submit, contents: list[Content]) -> None:
    template, wanted = request_template(submit), len(contents_of(submit.inputs))
    completion = Completion(1, outputs=submit.inputs)
    if len(contents) == wanted:
        assert contents_of(whole_request(template, FormSubmit(1, 0, tuple(contents))).inputs) == tuple(contents)
        return
    words = f"^{len(contents)} tensors came in a record whose form has {wanted} there"
    with pytest.raises(InvalidArgument, match=words):
        whole_request(template, FormSubmit(1, 0, tuple(contents)))
    with pytest.raises(InvalidArgument, match=words):
        whole_answer(answer_template(completion), FormCompletion(1, 0, tuple(contents)))


# -------------------------------------------------------------------------------------------------------------- numbers


def template_of(number: int) -> Submit:
    return Submit(0, f"m{number}", 0, ())


def test_numbers_begin_again() -> None:
    forms: Forms[Submit] = Forms()
    made = [forms.form(template_of(number)) for number in range(MAX_FORMS)]
    assert [form.number for form in made] == list(range(MAX_FORMS))
    assert [forms.form(template_of(number)) for number in range(MAX_FORMS)] == made
    again = [forms.form(template_of(MAX_FORMS + number)) for number in range(2 * MAX_FORMS)]
    assert [form.number for form in again] == 2 * list(range(MAX_FORMS))
    assert len({*made, *again}) == 3 * MAX_FORMS
    # What was forgotten is another form when it comes again.
    late = forms.form(template_of(0))
    assert late is not made[0]
    assert late.template == made[0].template
    assert 0 <= late.number < MAX_FORMS


class Told:
    """A lane's two ends, as far as its forms go."""

    def __init__(self) -> None:
        ours, theirs = pair()
        self.channel, self._there = Channel(ours, decoder(ToWorker)), Channel(theirs, decoder(ToWorker))
        self.said: SaidForms[Submit] = SaidForms(self.channel, RequestForm)

    def say(self, form: Form[Submit]) -> list[RequestForm]:
        """What the other end is told of it."""
        self.said.say(form)
        self.channel.flush()
        received = self._there.receive()
        if received is None:
            return []
        records: Any = received[0]
        return list(records)

    def close(self) -> None:
        self.channel.close()
        self._there.close()


def test_a_lane_is_told_once_and_again_when_the_number_stood_for_another_form() -> None:
    first, same_number, other = Form(0, template_of(1)), Form(0, template_of(2)), Form(1, template_of(3))
    equal = Form(0, template_of(1))
    lane, second = Told(), Told()
    try:
        told = [len(lane.say(form)) for form in (first, first, other, first, same_number, same_number, other, first)]
        assert told == [1, 0, 1, 0, 1, 0, 0, 1]
        # Equal is not the same: whoever made it may have told others something else of the number meanwhile.
        assert lane.say(equal) == [RequestForm(0, template_of(1))]
        assert second.say(first) == [RequestForm(0, template_of(1))]
    finally:
        lane.close()
        second.close()


@given(st.lists(st.integers(0, 12), max_size=40))
def test_a_number_means_what_was_said_of_it_last(order: list[int]) -> None:
    """Forms of few numbers in any order: each record is read with the form it was sent with."""
    forms = [Form(number % 4, template_of(number)) for number in range(13)]
    lane, heard = Told(), HeardForms[Submit]()
    try:
        for number in order:
            for record in lane.say(forms[number]):
                heard.learn(record.number, record.submit)
            assert heard.find(forms[number].number) == forms[number].template
    finally:
        lane.close()


@pytest.mark.parametrize("number", [-1, MAX_FORMS, 1 << 40])
def test_numbers_that_nobody_gives(number: int) -> None:
    heard: HeardForms[Submit] = HeardForms()
    with pytest.raises(InvalidArgument, match=f"form {number} was told, forms have numbers below {MAX_FORMS}"):
        heard.learn(number, template_of(0))
    with pytest.raises(InvalidArgument, match=f"form {number} was never told"):
        heard.find(number)


def test_unknown_numbers() -> None:
    heard: HeardForms[Submit] = HeardForms()
    heard.learn(3, template_of(3))
    heard.learn(MAX_FORMS - 1, template_of(4))
    assert heard.find(3) == template_of(3)
    heard.learn(3, template_of(5))
    assert heard.find(3) == template_of(5)
    with pytest.raises(InvalidArgument, match="form 4 was never told"):
        heard.find(4)
