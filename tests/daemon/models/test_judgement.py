"""What is published of the daemon's readiness, and when."""

from __future__ import annotations

from tensord.daemon.models.judgement import Judgement
from tensord.daemon.models.readiness import Standing
from tensord.shm.progress import Loading, Readiness


def test_how_far_loads_are_while_something_is_not_served() -> None:
    published: list[Readiness] = []
    standings = [Standing("a", (1,), "", False), Standing("b", (), "loading", False)]
    judgement = Judgement(lambda: standings, published.append)
    judgement.judge(strict=True)
    assert published == []
    judgement.begin()
    for at in (Loading("b", 1), Loading("b", 1), Loading("b", 1, 2, 4, 1), None):
        judgement.loads(7, at)
        judgement.judge(strict=True)
    assert [one.sentence() for one in published] == [
        "1 of 2 models are not served: b (loading b)",
        "1 of 2 models are not served: b (compiling b 2/4, 0 from the cache)",
        "1 of 2 models are not served: b",
    ]
    standings[1] = Standing("b", (1,), "", False)
    # Loaded once more while everything is served: nobody waits for that.
    judgement.loads(7, Loading("b", 1))
    judgement.judge(strict=True)
    assert judgement.readiness == published[-1] == Readiness(True, 2, 0, ())
