"""Models that have a worker process to themselves: what they do to it touches nobody else, and it lives as long as they do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests import prepared
from tests.daemon_process import PATIENCE, DaemonProcess, tensorctl_status, wait_until
from tests.protocol.test_gpu_placement import serving, stub_of
from tests.repositories import ensemble, scale_model, write_model
from tests.scrapes import scrape

#: Runs the code that its requests bring.
SCRIPT = """
    import json
    import numpy as np
    from tensord import models

    inputs, outputs, host = {"code": "BYTES[1]"}, {"said": "BYTES[1]"}, True

    def create(path, config, device):
        import colorsys  # nobody else does
        def apply(params, inputs):
            scope = {"models": models}
            exec(inputs["code"][0].decode(), scope)
            return {"said": np.array([json.dumps(scope["said"])], np.object_)}
        return apply, None
"""
ALONE = 'parameters { key: "isolated" value { string_value: "true" } }\n'
PID = "import os; said = os.getpid()"
#: What models of a process share, as one of them sees it.
STATE = """
import os, sys, threading, warnings
import jax
found = []
thread = threading.Thread(target=lambda: found.append(jax.config.values["jax_enable_x64"]))
thread.start()
thread.join()
said = [found[0], "error" in {entry[0] for entry in warnings.filters}, not sys.path, "LOUD" in os.environ]
"""
#: Changes all of it, JAX's configuration for all threads.
LOUD = """
import os, sys, threading, warnings
import jax
thread = threading.Thread(target=lambda: jax.config.update("jax_enable_x64", True))
thread.start()
thread.join()
warnings.simplefilter("error")
sys.path.clear()
os.environ["LOUD"] = "1"
said = None
"""


def run(client: Any, model: str, code: str) -> Any:
    given = httpclient.InferInput("code", [1], "BYTES")
    given.set_data_from_numpy(np.array([code.encode()], np.object_))
    return json.loads(client.infer(model, [given]).as_numpy("said")[0])


@contextlib.contextmanager
def asking(daemon: DaemonProcess) -> Iterator[Any]:
    with httpclient.InferenceServerClient(daemon.url, network_timeout=PATIENCE, connection_timeout=PATIENCE) as client:
        yield client


def status(daemon: DaemonProcess) -> dict[str, dict[str, Any]]:
    """Returns the workers of ``tensorctl status``, by name."""
    found = tensorctl_status(daemon.folder / "control.sock")["workers"]
    return {worker["name"]: worker for worker in found}


def refusal(call: Callable[..., object], *arguments: Any, **fields: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **fields)
    return str(caught.value.message())


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts a daemon on the folder ``models``."""
    with contextlib.ExitStack() as running:

        def start(folder: Path, program: Sequence[str] = (), **options: dict[str, Any]) -> DaemonProcess:
            place = tmp_path / f"daemon{len(os.listdir(tmp_path))}"
            place.mkdir()
            options["supervisor"] = {"control_socket": str(place / "control.sock")} | options.get("supervisor", {})
            daemon = DaemonProcess(place, [folder], options)
            daemon.program = program or daemon.program
            running.enter_context(daemon).wait_ready()
            return daemon

        yield start


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write_model(folder, "neighbour", SCRIPT)
    write_model(folder, "alone", SCRIPT, ALONE)
    return folder


def test_what_it_does_to_its_process_touches_nobody(serve: Callable[..., DaemonProcess], models: Path) -> None:
    """Neither settings nor its end; and its neighbours' process is the same all the while."""
    daemon = serve(models)
    with asking(daemon) as client:
        process, own = run(client, "neighbour", PID), run(client, "alone", PID)
        assert process != own
        workers = status(daemon)
        assert {name: (w["pid"], w.get("isolated"), w["device"][-2:]) for name, w in workers.items()} == {
            "worker-0": (process, None, ":0"),
            "worker-0#alone": (own, "alone", ":0"),
        }
        assert all(worker["memory_mib"] > 0 for worker in workers.values())
        before = run(client, "neighbour", STATE)
        run(client, "alone", LOUD)
        assert run(client, "neighbour", STATE) == before
        # It keeps what it has made of its process: nobody puts anything back there.
        assert run(client, "alone", STATE) == [True, True, True, True]
        assert "it is put back" not in daemon.log
        # A request that ends it twice is answered, and the next one finds its replacement.
        message = refusal(run, client, "alone", "import os; os._exit(3)")
        assert "worker" in message
        again = run(client, "alone", PID)
        os.kill(again, signal.SIGKILL)
        assert run(client, "alone", PID) not in (own, again, process)
        assert run(client, "alone", STATE) == before
        assert run(client, "neighbour", PID) == process
        (found,) = client.get_inference_statistics("neighbour")["model_stats"]
        assert found["inference_stats"]["fail"]["count"] == 0
    shown = scrape(daemon.metrics_url)
    up, restarts = shown.of("tensord_worker_up", "worker"), shown.of("tensord_worker_restarts_total", "worker")
    assert (up["worker-0"], up["worker-0#alone"], restarts["worker-0"]) == (1, 1, 0)
    assert restarts["worker-0#alone"] >= 2
    assert shown.model("nv_inference_request_success", "neighbour") >= 4
    assert shown.model("nv_inference_request_success", "alone") >= 2


def test_its_process_lives_as_long_as_it_is_wanted(serve: Callable[..., DaemonProcess], models: Path) -> None:
    """The process also ends after a failed load; a load of more processes than allowed is refused with both numbers."""
    for name in ("second", "third"):
        write_model(models, name, SCRIPT, ALONE)
    write_model(models, "broken", "raise OSError('no')", ALONE + 'backend: "jax"')
    daemon = serve(models, repository={"control_mode": "explicit", "load": ["neighbour"]}, workers={"max_isolated": 2})
    with asking(daemon) as client:
        process = run(client, "neighbour", PID)
        assert len(daemon.workers) == 1
        client.load_model("alone")
        own = run(client, "alone", PID)
        run(client, "alone", LOUD)
        client.load_model("alone")
        # Another load of it is one in the same process.
        assert run(client, "alone", PID) == own
        client.load_model("second")
        assert refusal(client.load_model, "third") == (
            "load failed for model 'third': model 'third' is to have a worker to itself (isolated), and 2 models have one; at "
            "most 2 may (workers.max_isolated)\n"
        )
        client.unload_model("alone")
        wait_until(lambda: not psutil.pid_exists(own), "the end of its process", daemon)
        assert "OSError: no" in refusal(client.load_model, "broken")
        wait_until(lambda: len(daemon.workers) == 2, "the end of the process of one that failed", daemon)
        client.load_model("third")
        assert refusal(client.load_model, "alone").endswith("at most 2 may (workers.max_isolated)\n")
        client.unload_model("second")
        wait_until(lambda: len(daemon.workers) == 2, "the end of another process", daemon)
        # And at once again: what ends and what begins are two processes.
        for _ in range(3):
            client.load_model("alone")
            assert run(client, "alone", STATE)[3] is False
            client.unload_model("alone")
        wait_until(lambda: len(daemon.workers) == 2, "the end of the last one", daemon)
        assert set(status(daemon)) == {"worker-0", "worker-0#third"}
        assert run(client, "neighbour", PID) == process
    assert "its replacement starts" not in daemon.log
    assert set(scrape(daemon.metrics_url).of("tensord_worker_up", "worker")) == {"worker-0", "worker-0#third"}


def test_what_needs_it_in_another_process_is_refused(serve: Callable[..., DaemonProcess], models: Path) -> None:
    scale_model(models)
    scale_model(models, "scale_alone")
    (models / "scale_alone" / "config.pbtxt").write_text(ALONE)
    maps = {"x": "x"}, {"y": "y"}
    ensemble(
        models,
        "whole",
        ["x FP32 4"],
        ["z FP32 4"],
        [("scale_alone", *maps), ("scale_alone", {"x": "y"}, {"y": "z"})],
        8,
    )
    ensemble(models, "torn", ["x FP32 4"], ["z FP32 4"], [("scale", *maps), ("scale_alone", {"x": "y"}, {"y": "z"})], 8)
    ensemble(models, "itself", ["x FP32 4"], ["y FP32 4"], [("scale", *maps)], 8, ALONE)
    together = ALONE + 'parameters { key: "tensord_together" value { string_value: "us" } }'
    write_model(models, "together", SCRIPT, together)
    write_model(models, "maybe", SCRIPT, ALONE.replace("true", "maybe"))
    limited = ALONE + 'instance_group { rate_limiter { resources { name: "R" count: 1 } } }'
    write_model(models, "limited", SCRIPT, limited)
    wanted = {"control_mode": "explicit", "load": ["neighbour", "alone", "whole"]}
    daemon = serve(models, repository=wanted, rate_limit={"mode": "execution_count"})
    with asking(daemon) as client:
        given = httpclient.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(np.ones((1, 4), np.float32))
        assert client.infer("whole", [given]).as_numpy("z").tolist() == [[13.0] * 4]
        said = refusal(client.load_model, "torn")
        assert re.search(
            r": 'scale' on (\w+:0), 'scale_alone' on \1#scale_alone \('scale_alone' is isolated, which no model of an ensemble "
            r"with others can be\)\n$",
            said,
        )
        for name, why in {
            "itself": "ensemble 'itself' cannot be isolated: it has no code of its own",
            "together": "model 'together' is to have a worker to itself (isolated), and to share one with the models of 'us' ",
            "maybe": "model 'maybe': parameter isolated is 'maybe'; expected true or false",
        }.items():
            assert "failed to poll" in refusal(client.load_model, name)
            (entry,) = [each for each in client.get_model_repository_index() if each["name"] == name]
            assert why in entry["reason"]
        assert "nobody counts the resources that it shares with others (rate_limiter)" in refusal(
            client.load_model, "limited"
        )
        call = "try:\n    models.call('{}', {{}})\nexcept models.NotFound as error:\n    said = str(error)"
        for caller, called in (("neighbour", "alone"), ("alone", "neighbour")):
            said = run(client, caller, call.format(called))
            assert said.endswith("are on one worker, and a model that is isolated is on its own."), said
        assert run(client, "alone", "said = [models.is_ready('neighbour'), models.is_ready('torn')]") == [True, False]


def test_the_parameter_comes_and_goes(serve: Callable[..., DaemonProcess], models: Path) -> None:
    """A model moves between processes, and no request fails meanwhile. What a SIGHUP finds unchanged stays where it is."""
    daemon = serve(models, repository={"control_mode": "poll", "poll_interval": 0.2})
    config = models / "alone" / "config.pbtxt"
    with asking(daemon) as client:
        shared, own = run(client, "neighbour", PID), run(client, "alone", PID)

        def moved(there: Callable[[int], bool]) -> int:
            end = time.monotonic() + PATIENCE
            while not there(pid := run(client, "alone", PID)):
                assert time.monotonic() < end, daemon.log
            return int(pid)

        config.unlink()
        moved(lambda pid: pid == shared)
        wait_until(lambda: len(daemon.workers) == 1, "the end of its process", daemon)
        config.write_text(ALONE)
        other = moved(lambda pid: pid != shared)
        assert other not in (own, shared)
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("reload: done")
        assert (run(client, "alone", PID), run(client, "neighbour", PID)) == (other, shared)
    family = daemon.family()
    assert daemon.stop() == 0
    assert not [process for process in family if process.is_running()]


def test_a_process_that_cannot_start_fails_its_model_alone(
    serve: Callable[..., DaemonProcess], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it starts again and again the daemon serves the others, and says why that one is not served."""
    # Every interpreter imports it as it starts.
    (models.parent / "site").mkdir()
    (models.parent / "site" / "sitecustomize.py").write_text(
        "import os, sys\nif any(word.endswith('#alone') for word in sys.orig_argv):\n"
        f"    os.path.exists({str(models.parent / 'cured')!r}) or os._exit(9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(models.parent / "site"))
    options = {"max_restart_delay": 0.2, "restart_delay": 0.05}
    repository = {"control_mode": "explicit", "load": ["neighbour", "alone"], "strict_readiness": False}
    daemon = serve(models, [sys.executable, "-m", "tensord"], repository=repository, expert=options)
    with asking(daemon) as client:
        assert not client.is_model_ready("alone")
        said = refusal(client.load_model, "alone")
        assert re.search(r"no worker can use \w+:0#alone at present", said)
        run(client, "neighbour", PID)
        (models.parent / "cured").touch()
        wait_until(lambda: client.is_model_ready("alone"), "its process", daemon)
        assert run(client, "alone", PID) != run(client, "neighbour", PID)


def test_a_check_loads_it_in_a_process_of_its_own(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", str(tmp_path / "cache"))
    left = "import builtins\nassert not hasattr(builtins, 'somebody'), 'not alone'\nbuiltins.somebody = True\n"
    for name, config in (("a_shared", ""), ("b_alone", ALONE), ("c_alone", ALONE), ("d_alone", ALONE)):
        write_model(models, name, left + "\n".join(line.removeprefix("    ") for line in SCRIPT.splitlines()), config)
    command = ["tensord", "check", f"--model-repository={models}", "--device=cpu"]
    monkeypatch.setenv("TENSORD_WORKERS_MAX_ISOLATED", "3")
    done = prepared.run(command)
    assert "models: 5 good, 1 bad" in done.stdout, done.stderr
    assert (
        "isolated, in a worker of its own (cpu:0#b_alone): it cannot call other models, nor can they call it"
        in done.stdout
    )
    assert (
        "d_alone: model 'd_alone' is to have a worker to itself (isolated), and 3 models have one; at most 3 may"
        in done.stderr
    )


def test_its_part_of_a_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    says = (
        "import os\nsaid = [os.environ[name] for name in ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_PREALLOCATE')]"
    )
    part = ALONE + 'parameters { key: "isolated_memory_fraction" value { string_value: "PART" } }\n'
    write_model(folder, "neighbour", SCRIPT)
    write_model(folder, "alone", SCRIPT, ALONE)
    write_model(folder, "one_gpu", SCRIPT, part.replace("PART", "0.125") + "instance_group { gpus: [ 1 ] }")
    write_model(folder, "large", SCRIPT, part.replace("PART", "0.1"))
    stub = stub_of(tmp_path, devices=2)
    control = {"control_socket": str(tmp_path / "daemon" / "control.sock")}
    more = {
        "supervisor": control,
        "repository": {"control_mode": "explicit", "load": ["neighbour", "alone", "one_gpu"]},
    }
    with serving(stub, folder, "0,1", more, gpu_memory_fraction=0.7) as daemon, asking(daemon) as client:
        for name, found in {"neighbour": "0.7", "alone": "0.1", "one_gpu": "0.125"}.items():
            assert run(client, name, says) == [found, "true"]
        workers = status(daemon)
        assert {name: (w["device"], w.get("memory_fraction")) for name, w in workers.items()} == {
            "worker-0": ("cuda:0", None),
            "worker-1": ("cuda:1", None),
            "worker-0#alone": ("cuda:0", 0.1),
            "worker-1#alone": ("cuda:1", 0.1),
            "worker-1#one_gpu": ("cuda:1", 0.125),
        }
        assert refusal(client.load_model, "large") == (
            "load failed for model 'large': model 'large' is to have 0.1 of the memory of cuda:1 to itself "
            "(isolated_memory_fraction), and 0.925 of it are taken: 0.7 by the workers that models share "
            "(workers.gpu_memory_fraction), 0.225 by other isolated models; that would be 1.025\n"
        )
        client.unload_model("one_gpu")
        wait_until(lambda: len(daemon.workers) == 4, "the end of its process", daemon)
        client.load_model("large")
        assert len(daemon.workers) == 6
