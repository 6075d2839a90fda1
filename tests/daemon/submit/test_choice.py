"""Which worker gets a request; what is remembered of it holds until anything changes that it depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from daemon.submit.choice import Choice
from daemon.submit.model_table import ModelTable
from daemon.submit.pending import Calling, Pending, Worker
from shm.control_records import ModelGone, ModelState, RegionPlace
from shm.errors import InvalidArgument, NotFound
from shm.forms import MAX_FORMS, Form
from shm.messages import FormSubmit, Inline, RegionSlice, Submit, Tensor


def worker_of(incarnation: int, device: str = "cpu:0") -> Worker:
    return Worker(incarnation, device, cast(Any, None), cast(Any, None))


def asks(regions: tuple[str, ...] = (), model: str = "m") -> Submit:
    inputs = tuple(Tensor(f"x{name}", "UINT8", (1,), RegionSlice(name, 0, 1)) for name in regions)
    return Submit(1, model, 0, (*inputs, Tensor("y", "UINT8", (1,), Inline(b"1"))))


def plain(submit: Submit) -> Pending:
    return Calling(lambda completion, lane: None, record=submit)


def formed(submit: Submit) -> Pending:
    return Calling(lambda completion, lane: None, record=FormSubmit(1, 0, (b"1",)), form=Form(0, submit))


def choice_of(*workers: Worker, row: int = 0) -> Choice:
    choice = Choice(ModelTable(), row)
    for worker in workers:
        choice.add(worker)
    choice.model_changed(ModelState("m", 1, "READY", workers=tuple(worker.incarnation for worker in workers)))
    return choice


def test_the_least_loaded_and_among_equals_the_first() -> None:
    first, second = worker_of(1), worker_of(2)
    choice = choice_of(first, second)
    assert choice.find(plain(asks())) is first
    first.in_flight[1] = plain(asks())
    assert choice.find(plain(asks())) is second
    choice.close(second)
    assert choice.find(plain(asks())) is first


def test_each_front_begins_with_another_worker() -> None:
    first, second = worker_of(1), worker_of(2)
    assert [choice_of(first, second, row=row).find(plain(asks())) for row in range(3)] == [first, second, first]


def test_regions_of_one_device_or_none() -> None:
    first, second = worker_of(1, "cuda:0"), worker_of(2, "cuda:1")
    choice = choice_of(first, second)
    choice.region_placed(RegionPlace("a", "cuda:0"))
    choice.region_placed(RegionPlace("b", "cuda:1"))
    assert choice.find(plain(asks(("b",)))) is second
    assert (choice.device_of(asks(("b",))), choice.device_of(asks())) == ("cuda:1", "")
    with pytest.raises(InvalidArgument, match="regions of one GPU only"):
        choice.find(plain(asks(("a", "b"))))
    assert choice.device_of(asks(("a", "b"))) == ""
    choice.close(second)
    assert choice.find(plain(asks(("b",)))) is None


def test_models_that_are_not_there() -> None:
    choice = choice_of(worker_of(1))
    with pytest.raises(NotFound):
        choice.find(plain(asks(model="other")))
    assert choice.state_of(asks(model="other")) is None
    state = ModelState("m", 1, "READY", workers=(1,), repeatable=False)
    choice.model_changed(state)
    assert choice.state_of(asks()) == state


# ------------------------------------------------------------------------------------------------------------ sequences


def of_sequence(sequence: int | str, regions: tuple[str, ...] = ()) -> Pending:
    form = Form(0, asks(regions))
    return Calling(lambda completion, lane: None, record=FormSubmit(1, 0, (b"1",), sequence_id=sequence), form=form)


def sticky_choice(*workers: Worker, row: int = 0) -> Choice:
    choice = choice_of(*workers, row=row)
    incarnations = tuple(worker.incarnation for worker in workers)
    choice.model_changed(ModelState("m", 1, "READY", workers=incarnations, repeatable=False, sticky=True))
    return choice


def test_a_sequence_stays_with_its_worker_whatever_that_has_to_do() -> None:
    workers = [worker_of(number, f"cpu:{number}") for number in range(4)]
    choice, other = sticky_choice(*workers), sticky_choice(*reversed(workers), row=1)
    homes = {sequence: choice.find(of_sequence(sequence)) for sequence in (*range(1, 20), "1", "two")}
    assert set(homes.values()) == set(workers)
    for worker in workers[:2]:
        worker.in_flight |= {number: of_sequence(1) for number in range(9)}
    for sequence, worker in homes.items():
        assert choice.find(of_sequence(sequence)) is worker
        assert other.find(of_sequence(sequence)) is worker
    # Nothing is remembered by form: the next request of it is of another sequence.
    assert not choice.remembered


def test_a_request_of_no_sequence_goes_where_there_is_least_to_do() -> None:
    first, second = worker_of(1, "cpu:0"), worker_of(2, "cpu:1")
    choice = sticky_choice(first, second)
    for worker, other in ((first, second), (second, first)):
        other.in_flight |= {number: of_sequence(1) for number in range(len(worker.in_flight) + 1)}
        assert choice.find(of_sequence(0)) is choice.find(of_sequence("")) is worker


def test_a_sequence_waits_for_the_worker_that_replaces_its_own() -> None:
    workers = [worker_of(number, f"cpu:{number}") for number in range(2)]
    choice = sticky_choice(*workers)
    sequences = [number for number in range(1, 20) if choice.find(of_sequence(number)) is workers[0]]
    others = [number for number in range(1, 20) if number not in sequences]
    assert sequences
    assert others
    choice.close(workers[0])
    assert {choice.find(of_sequence(number)) for number in sequences} == {None}
    replacement = worker_of(7, "cpu:0")
    choice.add(replacement)
    choice.model_changed(ModelState("m", 1, "READY", workers=(1, 7), repeatable=False, sticky=True))
    assert {choice.find(of_sequence(number)) for number in sequences} == {replacement}
    assert {choice.find(of_sequence(number)) for number in others} == {workers[1]}


def test_a_worker_that_has_not_the_model_has_none_of_its_sequences() -> None:
    workers = [worker_of(number, f"cpu:{number}") for number in range(2)]
    choice = sticky_choice(*workers)
    choice.model_changed(ModelState("m", 1, "READY", workers=(1,), repeatable=False, sticky=True))
    assert {choice.find(of_sequence(number)) for number in range(1, 20)} == {workers[1]}


def test_a_region_on_another_gpu_than_the_sequence_is_refused() -> None:
    workers = [worker_of(number, f"cuda:{number}") for number in range(2)]
    choice = sticky_choice(*workers)
    for number in range(2):
        choice.region_placed(RegionPlace(f"on {number}", f"cuda:{number}"))
    sequence = next(number for number in range(1, 99) if choice.find(of_sequence(number)) is workers[0])
    assert choice.find(of_sequence(sequence, ("on 0",))) is workers[0]
    words = f"^sequence {sequence} of model 'm' is on cuda:0, its request names a region that is on cuda:1$"
    with pytest.raises(InvalidArgument, match=words):
        choice.find(of_sequence(sequence, ("on 1",)))


# -------------------------------------------------------------------------------------------------------------- changes


@pytest.mark.parametrize(
    "change",
    [
        lambda choice: choice.model_changed(ModelState("m", 1, "READY", workers=(2,))),
        lambda choice: choice.model_changed(ModelGone("m", 1)),
        lambda choice: choice.region_placed(RegionPlace("a", "cuda:1")),
        lambda choice: choice.close(choice.workers[1]),
        lambda choice: choice.add(worker_of(3)),
    ],
    ids=["model", "gone", "region", "closed", "opened"],
)
def test_every_change_ends_what_is_remembered(change: Callable[[Choice], None]) -> None:
    first, second = worker_of(1, "cuda:0"), worker_of(2, "cuda:1")
    choice = choice_of(first, second)
    pending = formed(asks(("a",)))
    assert choice.find(pending) is first
    assert choice.remembered == {pending.form: (first, second)}
    change(choice)
    assert not choice.remembered


def test_only_forms_with_a_worker_are_remembered_and_not_too_many() -> None:
    choice = choice_of(worker_of(1))
    choice.find(plain(asks()))
    assert not choice.remembered
    choice.close(choice.workers[1])
    assert choice.find(formed(asks())) is None
    assert not choice.remembered
    choice.add(worker_of(1))
    for _ in range(MAX_FORMS + 1):
        choice.find(formed(asks()))
        assert 0 < len(choice.remembered) <= MAX_FORMS
    assert "1 workers" in repr(choice)
