"""Names of the arrays of a tree, and the tree that a function is called with."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import pytest

from tensord.shm.errors import Internal, InvalidArgument
from tensord.workers.tensors.tensor_trees import declarations, is_tree, taking_trees


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclass
class Text:
    ids: Any
    mask: Any


@dataclass
class Unknown:
    ids: Any


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"b": 1, "a": 2}, ["b", "a"]),
        ({"x": {"b": 1, "a": 2}, "k": 3}, ["k", "x.a", "x.b"]),
        ((1, 2), ["input_0", "input_1"]),
        (1, ["input_0"]),
        ([1, (2, {"c": 3})], ["input_0", "1.0", "1.1.c"]),
        ({"t": Text(1, 2), "p": Pair(1, [2])}, ["p.left", "p.right.0", "t.ids", "t.mask"]),
        (Text(1, Pair(2, 3)), ["ids", "mask.left", "mask.right"]),
    ],
)
def test_names(tree: Any, names: list[str]) -> None:
    assert list(declarations("m", tree, "input")) == names
    # What is given by name comes as the tree, and goes by name again.
    given = {name: number for number, name in enumerate(names)}
    expected = jax.tree.map(lambda leaf: leaf, tree)

    def same(params: Any, inputs: Any) -> Any:
        assert jax.tree.structure(inputs) == jax.tree.structure(expected)
        return inputs

    apply = taking_trees("m", same, tree, None)
    assert apply(None, given) == {name.replace("input_", "output_"): value for name, value in given.items()}


def test_which_models_have_trees() -> None:
    module = ModuleType("model")
    assert not is_tree(module)
    vars(module).update(inputs={"x": "FP32[1]"}, outputs={"y": "FP32[1]"})
    assert not is_tree(module)
    vars(module).update(outputs={"y": ("FP32[1]",)})
    assert is_tree(module)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "m: two inputs are called 'a.b'"),
        ({"x": Unknown(1)}, ""),
        (
            [Unknown(1)],
            "m: input 'input_0' is declared as a Unknown, which is no pytree: jax.tree_util.register_dataclass",
        ),
    ],
)
def test_what_is_no_tree_of_declarations(tree: Any, words: str) -> None:
    if not words:  # one that is read as a declaration, and refused there
        assert list(declarations("m", tree, "input")) == ["x"]
        return
    with pytest.raises(InvalidArgument, match=words):
        declarations("m", tree, "input")


def test_nothing_is_passed_over_in_silence() -> None:
    """JAX takes None for a tree without leaves."""
    assert declarations("m", {"x": None, "t": (None,)}, "input") == {"x": None, "t.0": None}


def test_an_input_that_is_not_there_is_none() -> None:
    apply = taking_trees("m", lambda params, inputs: inputs["t"]["b"] is None, {"t": {"a": "", "b": ""}}, {"y": ""})
    assert apply(None, {"t.a": 1}) is True


def test_what_the_server_adds_is_beside_what_is_declared() -> None:
    tree = {"t": ("", "")}
    apply = taking_trees("m", lambda params, inputs: inputs, tree, {"y": ""}, ["t.0", "t.1", "START"])
    assert apply(None, {"t.0": 1, "t.1": 2, "START": 3}) == {"t": (1, 2), "START": 3}
    with pytest.raises(InvalidArgument, match="inputs are declared as a tuple, which has no place for 'START'"):
        taking_trees("m", lambda params, inputs: inputs, ("", ""), None, ["input_0", "input_1", "START"])


def test_state_is_left_as_it_is() -> None:
    state = {"h": {"deep": 1}}
    apply = taking_trees(
        "m", lambda params, inputs, state: ({"y": (1,)}, state), {"x": ""}, {"y": ("",)}, stateful=True
    )
    assert apply(None, {"x": 1}, state) == ({"y.0": 1}, state)


def test_outputs_with_one_name() -> None:
    apply = taking_trees("m", lambda params, inputs: {"a.b": 1, "a": {"b": 2}}, {"x": ""}, None)
    with pytest.raises(Internal, match="two of its outputs have one name"):
        apply(None, {"x": 1})
