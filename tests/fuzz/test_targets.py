"""What is fuzzed reads its corpus, and changes of it: so a target that a change breaks is seen before somebody fuzzes."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_holds_for_its_corpus_and_for_changes_of_it(name: str) -> None:
    target, chance = TARGETS[name], random.Random(name)
    for content in target.corpus(name):
        target.run(content)
        for _ in range(5):
            changed = bytearray(content)
            changed[chance.randrange(len(changed))] = chance.randrange(256)
            target.run(bytes(changed[: chance.randrange(len(changed) + 1)]))
