"""Tests a worker whose JAX lacks the pickler that ours is made of."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from jax.experimental import serialize_executable

from tensord.workers.compiling.compilers import Compilers
from tensord.workers.jax_internals import interfaces
from tensord.workers.processor import outside_compiler
from tensord.workers.processor.outside_compiler import OutsideCompiler
from tensord.workers.programs import serialized
from tensord.workers.programs.executable_cache import ExecutableCache
from tests.workers.processor.test_outside_compiler import answers, model


@pytest.fixture(params=["nothing", "another one"])
def other_jax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "nothing":
        monkeypatch.delattr(serialize_executable, "_JaxPjrtPickler")
    else:
        monkeypatch.setattr(serialize_executable, "_JaxPjrtPickler", object)
    serialized._pickler.cache_clear()
    # Uncached, because what another test has found stays.
    monkeypatch.setattr(outside_compiler, "_hook", outside_compiler._hook.__wrapped__)
    yield
    serialized._pickler.cache_clear()


def test_programs_are_compiled_in_the_worker(other_jax: None, caplog: pytest.LogCaptureFixture) -> None:
    compilers = Compilers(1)
    made = model(cache=ExecutableCache(None, None, OutsideCompiler(compilers)))
    assert answers(made) == answers(model())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    (said,) = interfaces.missing()
    assert said.startswith(
        "programs are compiled in the worker (jax.experimental.serialize_executable._JaxPjrtPickler: "
    )
