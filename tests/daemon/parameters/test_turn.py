"""The order of changes of a model's parameters and of its loads."""

from __future__ import annotations

import asyncio

from hypothesis import example, given
from hypothesis import strategies as st

from tensord.daemon.parameters.turn import Turn

#: "change" and "load" come; a number ends one of those that came and have not ended, whether it waits or has its turn.
STEPS = st.lists(st.sampled_from(("change", "load")) | st.integers(0, 7), max_size=30)


@given(STEPS)
@example(["load", "change", "load", 0, "load", 1])
def test_each_waits_for_what_came_before_it_and_for_nothing_else(steps: list[str | int]) -> None:
    """A change waits for all that came before it, a load for the changes: so loads that overlap hold up no change for ever."""
    asyncio.run(_run(steps))


async def _run(steps: list[str | int]) -> None:
    turn = Turn()
    #: Those that have not ended, in the order in which they came, and those of them that have their turn.
    there: dict[int, tuple[str, asyncio.Task[None]]] = {}
    have: set[int] = set()

    async def take(number: int, kind: str) -> None:
        async with turn.change() if kind == "change" else turn.load():
            have.add(number)
            try:
                await asyncio.Event().wait()
            finally:
                have.remove(number)

    for number, step in enumerate([*steps, *[0] * len(steps)]):
        if isinstance(step, str):
            there[number] = step, asyncio.ensure_future(take(number, step))
        elif there:
            _, task = there.pop(list(there)[step % len(there)])
            task.cancel()
        for _ in range(3 * len(there) + 3):
            await asyncio.sleep(0)
        before: list[str] = []
        for each, (kind, _) in there.items():
            assert (each in have) == ("change" not in before and (kind == "load" or not before))
            before.append(kind)
