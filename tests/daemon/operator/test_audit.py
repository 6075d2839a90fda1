"""Tests that each change is one line that says who made it, that reads are none, and that floods are cut with their number."""

from __future__ import annotations

import logging

import pytest

from tensord.daemon.operator.audit import Audit
from tensord.shm.errors import InvalidArgument
from tensord.shm.operations import (
    ANONYMOUS,
    ChangeLog,
    ChangeTrace,
    DropParameters,
    FileSource,
    ListParameters,
    LoadModel,
    ModelStatistics,
    Operation,
    Peer,
    PushParameters,
    RegisterCudaRegion,
    RegisterSystemRegion,
    RepositoryIndex,
    RevertParameters,
    UnloadModel,
    UnregisterRegion,
)

BY = " by uid 1000, pid 4711"
FILE = FileSource("p.npz")
UNIX, TCP = Peer("unix", "", 4711, 1000, 1000), Peer("tcp", "10.0.0.1:5000")


@pytest.mark.parametrize(
    ("operation", "peer", "expected"),
    [
        (LoadModel("m"), TCP, "load of model 'm' by 10.0.0.1:5000"),
        (LoadModel("m", "{}", {"a": b"", "b": b""}), TCP, "load of model 'm', with a configuration and 2 files by 10.0.0.1:5000"),
        (UnloadModel("m"), None, "unload of model 'm' by a model"),
        (PushParameters("m", 0, "main", FILE), UNIX, "push of parameter set 'main' of model 'm'" + BY),
        (PushParameters("m", 2, "a", FILE, 7), TCP, "push of parameter set 'a' of model 'm' version 2 by 10.0.0.1:5000"),
        (RevertParameters("m", 0, "main"), Peer("operator"), "roll-back of parameter set 'main' of model 'm' by tensorctl"),
        (DropParameters("m", 0, "a"), TCP, "drop of parameter set 'a' of model 'm' by 10.0.0.1:5000"),
        (ListParameters("m"), TCP, ""),
        (RegisterSystemRegion("r", "/k", 5, 64), UNIX, "registration of region 'r' (64 bytes of '/k' from 5)" + BY),
        (RegisterSystemRegion("r", "", 0, 64), UNIX, "registration of region 'r' (64 bytes of a memfd from 0)" + BY),
        (RegisterCudaRegion("r", b"secret", 1, 64), TCP, "registration of region 'r' (64 bytes of GPU 1) by 10.0.0.1:5000"),
        (UnregisterRegion("system", "r"), Peer("operator"), "unregistration of region 'r' by tensorctl"),
        (UnregisterRegion("cuda", ""), ANONYMOUS, "unregistration of all cuda regions by a client that is gone"),
        (ChangeLog(verbose=1, info=False), TCP, "change of log settings (info=False, verbose=1) by 10.0.0.1:5000"),
        (ChangeTrace("m", rate=1), TCP, "change of trace settings of model 'm' (rate=1) by 10.0.0.1:5000"),
        (ChangeTrace(cleared=("rate",)), TCP, "change of trace settings (cleared=('rate',)) by 10.0.0.1:5000"),
        (ChangeLog(), TCP, ""),
        (ChangeTrace("m"), TCP, ""),
        (ModelStatistics("m"), TCP, ""),
        (RepositoryIndex(), TCP, ""),
    ],
)  # fmt: skip
def test_lines(operation: Operation, peer: Peer | None, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    audit = Audit()
    audit.note(operation, peer, InvalidArgument("it may not"))
    lines = [f"audit: {expected}, refused: it may not"] if expected else []
    if not isinstance(operation, PushParameters | RevertParameters):
        audit.note(operation, peer)
        lines += [f"audit: {expected}"] if expected else []
    assert [record.message for record in caplog.records] == lines


def test_parameters_that_are_put_into_force(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    result = b'{"model": "m", "version": 2, "set": "main", "number": 17, "byte_size": 64}'
    for operation in (PushParameters("m", 0, "main", FILE), RevertParameters("m", 2, "main")):
        Audit().note(operation, UNIX, result=result)
    assert [record.message for record in caplog.records] == [
        f"audit: push of parameter set 'main' of model 'm'{BY}: number 17 of version 2, 64 bytes",
        f"audit: roll-back of parameter set 'main' of model 'm' version 2{BY}: number 17 of version 2, 64 bytes",
    ]


def test_a_flood_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [10**12]
    audit = Audit(lambda: now[0])
    for _ in range(100):
        audit.note(UnregisterRegion("system", "r"), TCP)
    assert len(caplog.records) == 20
    caplog.clear()
    for _ in range(100):
        audit.note(UnloadModel("m"), TCP)
    assert len(caplog.records) == 20
    now[0] += 10**9
    for _ in range(2):
        audit.note(UnloadModel("m"), TCP)
    assert caplog.records[20].message.endswith("by 10.0.0.1:5000 (80 such lines before it were left out)")
    assert caplog.records[21].message.endswith("by 10.0.0.1:5000")
