"""Tests what a front knows of the models: the last word on each version, and which one serves."""

from __future__ import annotations

import pytest

from tensord.daemon.submit.model_states import ModelStates, parse_version
from tensord.shm.control_records import Derivative, ModelGone, ModelState
from tensord.shm.errors import InvalidArgument, NotFound, Unavailable


@pytest.fixture
def table() -> ModelStates:
    table = ModelStates()
    table.update(ModelState("m", 1, "READY", workers=(5,)))
    table.update(ModelState("m", 3, "READY", workers=()))
    table.update(ModelState("m", 4, "LOADING"))
    table.update(ModelState("n", 1, "UNAVAILABLE", "failed"))
    return table


def test_the_newest_ready_version_serves(table: ModelStates) -> None:
    assert table.find("m").version == 3
    assert table.find("m", 1).version == 1
    assert table.ready_versions("m") == [1, 3]
    table.update(ModelState("m", 4, "READY"))
    assert table.find("m").version == 4
    table.update(ModelState("m", 4, "UNLOADING"))
    table.remove(ModelGone("m", 3))
    assert table.find("m").version == 1


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("x", 0, "Request for unknown model: 'x' is not found"),
        ("x", 1, "Request for unknown model: 'x' is not found"),
        ("m", 2, "Request for unknown model: 'm' version 2 is not found"),
        ("n", 0, "Request for unknown model: 'n' has no available versions: version 1: failed"),
    ],
)
def test_what_does_not_serve(table: ModelStates, name: str, version: int, text: str) -> None:
    with pytest.raises(NotFound) as caught:
        table.find(name, version)
    assert caught.value.message == text
    assert not table.is_ready(name, version)


def test_derivatives_come_and_go_with_their_version(table: ModelStates) -> None:
    pulled = Derivative("n.pull_back", b"metadata", b"{}")
    table.update(
        ModelState("n", 2, "READY", workers=(5,), derivatives=(pulled, Derivative("n.push_forward", b"", b"")))
    )
    found = table.find("n.pull_back")
    assert (found.version, found.workers, found.metadata, found.derivatives) == (2, (5,), b"metadata", ())
    lacking = {"n.value_and_gradient": "this is why", "n.pull_back.push_forward": "this, too"}
    table.update(ModelState("n", 2, "READY", workers=(6,), derivatives=(pulled,), lacking=lacking))
    for name, why in lacking.items():
        with pytest.raises(NotFound, match=f": model '{name.rpartition('.')[0]}' has no .*: {why}$"):
            table.find(name)
    assert table.find("n.pull_back", 2).workers == (6,)
    with pytest.raises(
        NotFound, match=r"'n.push_forward' is not found: model 'n' has no push_forward.*derivatives = True"
    ):
        table.find("n.push_forward")
    table.update(ModelState("o", 1, "LOADING"))
    for name in ("o.pull_back", "o.pull_back.push_forward"):
        with pytest.raises(Unavailable, match="model 'o' is being loaded"):
            table.find(name)
    for name in ("n.push_forward.pull_back", "n.pull_back.pull_back.pull_back"):
        with pytest.raises(NotFound, match=r"model 'n.*' has no "):
            table.find(name)
    table.remove(ModelGone("n", 2))
    assert not table.is_ready("n.pull_back")


def test_what_is_being_loaded_is_expected(table: ModelStates) -> None:
    """It takes nothing from what serves, and is nothing that answers."""
    assert table.expect("m").version == 3
    assert table.expect("m", 4).state == "LOADING"
    assert not table.is_ready("m", 4)
    table.update(ModelState("n", 2, "LOADING"))
    assert table.expect("n").version == 2
    for version, of in ((0, "'n'"), (2, "'n' version 2")):
        with pytest.raises(Unavailable, match=f"^model {of} is being loaded$"):
            table.find("n", version)
    with pytest.raises(NotFound, match="'n' version 1 is not found"):
        table.expect("n", 1)
    for version in (0, 2):  # which derivatives there will be is not known
        assert table.expect("n.pull_back.push_forward", version).name == "n"
    with pytest.raises(NotFound, match="'n' version 1 is not found"):
        table.expect("n.pull_back", 1)
    table.update(ModelState("n", 2, "UNAVAILABLE", "failed"))
    with pytest.raises(NotFound, match="'n' has no available versions"):
        table.expect("n")


@pytest.mark.parametrize("version", [0, 2])
def test_what_is_to_be_served_and_cannot_be_now_is_not_unknown(table: ModelStates, version: int) -> None:
    table.update(ModelState("n", 2, "UNAVAILABLE", "its GPU is broken", awaited=True))
    for find in (table.find, table.expect):
        with pytest.raises(
            Unavailable, match=r"^model 'n'( version 2)? cannot be served now: .*version 2: its GPU is broken$"
        ):
            find("n", version)
    assert not table.is_ready("n", version)
    table.update(ModelState("n", 2, "UNLOADING", "a model of it is awaited", awaited=True))
    with pytest.raises(Unavailable, match=r"cannot be served now: .*version 2: a model of it is awaited$"):
        table.find("n", version)
    table.update(ModelState("n", 2, "UNAVAILABLE", "unloaded"))
    with pytest.raises(NotFound):
        table.find("n", version)


def test_a_model_that_could_not_be_tried_says_why_of_each_version(table: ModelStates) -> None:
    table.update(ModelState("m", 0, "UNAVAILABLE", "its folder is wrong"))
    assert table.find("m", 3).state == "READY"
    table.update(ModelState("n", 0, "UNAVAILABLE", "a model of it is awaited", awaited=True))
    for version in (0, 1):
        with pytest.raises(Unavailable, match="cannot be served now: a model of it is awaited"):
            table.find("n", version)


def test_it_says_why_nothing_serves() -> None:
    table = ModelStates()
    table.update(ModelState("empty", 0, "UNAVAILABLE", "it has no version folder"))
    table.update(ModelState("broken", 2, "UNAVAILABLE", "ValueError: no"))
    table.update(ModelState("gone", 1, "UNAVAILABLE", "unloaded"))
    for name, version, text in (
        ("empty", 0, "'empty' has no available versions: it has no version folder"),
        ("broken", 0, "'broken' has no available versions: version 2: ValueError: no"),
        ("broken", 2, "'broken' version 2 is not found: version 2: ValueError: no"),
        ("gone", 0, "'gone' has no available versions"),
    ):
        with pytest.raises(NotFound) as caught:
            table.find(name, version)
        assert caught.value.message == f"Request for unknown model: {text}"


def test_ready_needs_a_worker_and_serving_does_not(table: ModelStates) -> None:
    assert table.is_ready("m", 1)
    assert not table.is_ready("m", 3)
    assert table.find("m", 3).workers == ()


def test_what_is_gone_is_forgotten(table: ModelStates) -> None:
    edition = table.edition
    for version in (1, 3, 4, 9):
        table.remove(ModelGone("m", version))
    table.remove(ModelGone("x", 1))
    assert table.edition > edition
    with pytest.raises(NotFound, match="'m' is not found"):
        table.find("m")


@pytest.mark.parametrize(("text", "version"), [("1", 1), ("01", 1), ("9223372036854775807", 2**63 - 1)])
def test_versions(text: str, version: int) -> None:
    assert parse_version("m", text) == version


@pytest.mark.parametrize("text", ["9223372036854775808", "9" * 41, "9" * 10_000])
def test_versions_beyond_int64(text: str) -> None:
    with pytest.raises(InvalidArgument, match="version should be an integral value > 0") as caught:
        parse_version("m", text)
    assert len(caught.value.message) < 300


def test_zero_is_no_version() -> None:
    with pytest.raises(NotFound, match="version 0 is not found"):
        parse_version("m", "00")
