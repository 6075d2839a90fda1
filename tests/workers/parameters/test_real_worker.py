"""Parameters that are pushed into a real worker process, also where a model lies on several devices."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tensord.config.options import Workers
from tensord.shm.arrays import Array
from tensord.shm.operations import CommitParameters, MakeParameters, MemorySource, StageParameters
from tests.repositories import write_model
from tests.workers.parameters.made_sets import sealed
from tests.workers.parameters.pushing import numbered, write_numbered
from tests.workers.worker_process import WorkerProcess

SHARDED = """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = 4
    inputs, outputs = {"x": "FP32[8]"}, {"y": "FP32[8]"}

    def create(path, config, devices):
        mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
        parameters = {"w": np.zeros((8, 8), np.float32), "b": np.zeros(8, np.float32), "unused": np.zeros(3, np.float32)}
        if %s:
            specs = {"w": P(None, "model"), "b": P("model"), "unused": P()}
            parameters = {name: jax.device_put(each, NamedSharding(mesh, specs[name])) for name, each in parameters.items()}

        def apply(parameters, inputs):
            w = jax.lax.with_sharding_constraint(parameters["w"], NamedSharding(mesh, P(None, "model")))
            return {"y": inputs["x"] @ w + parameters["b"]}

        return apply, parameters
    """


def push(worker: WorkerProcess, number: int, leaves: dict[str, Array], set: str = "main") -> None:
    fd = sealed(leaves)
    reply, _ = worker.call(StageParameters(number, "m", 1, set, number), fd)
    os.close(fd)
    assert not reply.code, reply.message
    reply, _ = worker.call(CommitParameters(number))
    assert not reply.code, reply.message


@pytest.mark.parametrize("laid", [True, False], ids=["by the author", "by the program"])
def test_on_several_devices(tmp_path: Path, laid: bool) -> None:
    """Each set lies as the one that the model was loaded with."""
    write_model(tmp_path, "m", SHARDED % laid, 'name: "m" max_batch_size: 4')
    with WorkerProcess(workers=Workers(devices_per_worker=4)) as worker:
        worker.serve(tmp_path, "m")
        for number in range(1, 6):
            w = np.full((8, 8), number, np.float32)
            push(worker, number, {"w": w, "b": w[0], "unused": w[0, :3]})
            for rows in (1, 3, 4):
                x = np.ones((rows, 8), np.float32)
                assert np.array_equal(worker.infer("m", {"x": x})["y"], np.full((rows, 8), 9 * number, np.float32))
        push(worker, 9, {"w": 0 * w, "b": 3 * w[0], "unused": w[0, :3]}, "a")
        x = np.ones((2, 8), np.float32)
        found = worker.infer("m", {"x": x}, parameter_set="a")["y"]
        assert np.array_equal(found, np.full((2, 8), 15, np.float32))


def test_memory_is_made_and_staged(tmp_path: Path) -> None:
    """The other workers get the memory that the first one makes."""
    write_numbered(tmp_path, "m", "max_batch_size: 8")
    with WorkerProcess() as worker:
        worker.serve(tmp_path, "m")
        fd = sealed({"w": numbered(5)["w"]})
        size = os.fstat(fd).st_size
        reply, fds = worker.call(MakeParameters("m", 1, MemorySource(size), partial=True), fd)
        os.close(fd)
        (made,) = fds
        assert json.loads(reply.result) == {"byte_size": os.fstat(made).st_size}
        for number in (1, 2):
            reply, _ = worker.call(StageParameters(number, "m", 1, "main", number), made)
            assert json.loads(reply.result) == {"byte_size": 32}
            assert worker.call(CommitParameters(number))[0].result == b"{}"
        os.close(made)
        (y,) = worker.infer("m", {"x": np.zeros((1, 8), np.float32)}).values()
        assert y.tolist() == [[5] * 4 + [0] * 4]
        assert worker.stop() == 0
