"""Another number of instances, and nothing else: those that stay go on as they are, and nothing is compiled again."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensord_client

from tests.daemon_process import DaemonProcess, wait_until
from tests.repositories import write_model

TRITON = """
import os, pathlib, threading, time
import triton_python_backend_utils as pb_utils

def note(what):
    with open(FILE, "a") as file:
        file.write(what + "\\n")

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        note("initialize " + self.name)
    def execute(self, requests):
        time.sleep(0.05)
        y = np.array([self.name.encode()], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for _ in requests]
    def is_ready(self):
        return not getattr(self, "gone", False)
    def finalize(self):
        self.gone = True
        note("finalize " + self.name)
"""
COMPLETES = (
    TRITON
    + """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "y", "data_type": "TYPE_STRING", "dims": [1]})
        return config
"""
)
CONFIG = """
backend: "python"
input [{{ name: "x" data_type: TYPE_FP32 dims: [4] }}]
output [{{ name: "y" data_type: TYPE_STRING dims: [1] }}]
instance_group [{{ count: {} }}]
"""
HOST = """
import pathlib, threading, time
inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}
host = True

def create(path, config, device):
    with open(FILE, "a") as file:
        file.write("created\\n")
    return (lambda params, inputs: {"y": inputs["x"] + threading.get_ident() * 0 + len(NAMES())}), {}

def NAMES():
    time.sleep(0.02)
    return []
"""
JAX = """
inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}
max_batch_size = 4

def create(path, config, device):
    with open(FILE, "a") as file:
        file.write("created\\n")
    def apply(params, inputs):
        with open(FILE, "a") as file:
            file.write("traced\\n")
        return {"y": inputs["x"] * params["factor"]}
    return apply, {"factor": np.float32(FACTOR)}
"""
GROUP = "instance_group [{{ count: {} }}]"
X = {"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}


class Counted:
    """A daemon with a model whose file records what happens to its instances."""

    def __init__(self, folder: Path, daemon: DaemonProcess) -> None:
        self.folder = folder
        self.daemon = daemon

    def said(self) -> list[str]:
        return (self.folder / "file").read_text().split("\n")[:-1]

    def config(self, text: str) -> None:
        (self.folder / "models/m/config.pbtxt").write_text(text)

    def given(self) -> list[int]:
        """Returns the counts of instances in the configuration that the daemon answers."""
        config = json.loads(self.daemon.get("/v2/models/m/config")[1])
        return [group["count"] for group in config["instance_group"]]

    def used(self) -> Counter[str]:
        """Returns how many of many simultaneous requests each instance answered."""

        def ask(_: int) -> str:
            status, body = self.daemon.infer("m", [X])
            assert status == 200, body
            return str(body["outputs"][0]["data"][0])

        with ThreadPoolExecutor(8) as pool:
            return Counter(pool.map(ask, range(32)))


@pytest.fixture
def counted(tmp_path: Path, start_daemon: Callable[..., DaemonProcess]) -> Callable[..., Counted]:
    def start(source: str, config: str = "", **repository: object) -> Counted:
        told = f"import numpy as np\nFILE, FACTOR = {str(tmp_path / 'file')!r}, 2\n"
        write_model(tmp_path / "models", "m", told + source, config)
        daemon = start_daemon(
            tmp_path / "models", repository=repository, executables={"cache_directory": str(tmp_path / "cache")}
        )
        daemon.wait_ready()
        return Counted(tmp_path, daemon)

    return start


def test_triton_instances_in_poll_mode(counted: Callable[..., Counted]) -> None:
    """From one to three to two, while requests come all the time: none fails, and who stays is initialized once."""
    model = counted(TRITON, CONFIG.format(1), control_mode="poll", poll_interval=0.2)
    assert model.said() == ["initialize m_0_0"]
    model.config(CONFIG.format(3))
    wait_until(lambda: model.used().keys() == {"m_0_0", "m_0_1", "m_0_2"}, "three instances", model.daemon)
    assert sorted(model.said()) == ["initialize m_0_0", "initialize m_0_1", "initialize m_0_2"]
    assert model.given() == [3]
    model.config(CONFIG.format(2))
    wait_until(lambda: "finalize m_0_2" in model.said(), "the end of one", model.daemon)
    assert model.used().keys() == {"m_0_0", "m_0_1"}
    assert len(model.said()) == 4
    assert model.given() == [2]
    assert model.daemon.get("/v2/models/m/ready")[0] == 200
    statistics = json.loads(model.daemon.get("/v2/models/m/stats")[1])["model_stats"]
    assert len(statistics) == 1


def test_triton_instances_when_asked_for(counted: Callable[..., Counted]) -> None:
    """By a load, with a configuration and without; unchanged files are loaded again, as ever, and so are changed ones."""
    model = counted(TRITON, CONFIG.format(1), control_mode="explicit", load=["m"])

    def load(config: str = "") -> None:
        body = json.dumps({"parameters": {"config": config}} if config else {}).encode()
        status, answer = model.daemon.request("POST", "/v2/repository/models/m/load", body)
        assert status == 200, answer

    model.config(CONFIG.format(2))
    load()
    assert sorted(model.said()) == ["initialize m_0_0", "initialize m_0_1"]
    given = json.loads(model.daemon.get("/v2/models/m/config")[1])
    given = {key: given[key] for key in ("name", "backend", "input", "output")}
    load(json.dumps({**given, "instance_group": [{"count": 3}]}))
    assert sorted(model.said()) == [f"initialize m_0_{number}" for number in range(3)]
    # A file that has been written again takes the place of what was given.
    model.config(CONFIG.format(2))
    load()
    wait_until(lambda: len([each for each in model.said() if each.startswith("finalize")]) == 1, "an end", model.daemon)
    assert model.used().keys() == {"m_0_0", "m_0_1"}
    # Nothing has changed: that is what an explicit load is for.
    load()
    wait_until(lambda: len(model.said()) == 8, "all to begin anew", model.daemon)
    # Something else has.
    model.config(CONFIG.format(3).replace("[4]", "[-1]"))
    load()
    wait_until(lambda: len(model.said()) == 13, "all to begin anew", model.daemon)
    assert Counter(model.said()) == {
        **{f"initialize m_0_{number}": 3 for number in range(2)},
        "initialize m_0_2": 2,
        **{f"finalize m_0_{number}": 2 for number in range(2)},
        "finalize m_0_2": 1,
    }


@pytest.mark.parametrize("source", [TRITON, JAX, COMPLETES])
def test_with_the_configuration_that_the_server_gives(counted: Callable[..., Counted], source: str) -> None:
    """Whoever changes the number in what the daemon answers changes the number, also where the model has completed the rest."""
    model = counted(source, CONFIG.format(1) if source is TRITON else "", control_mode="explicit", load=["m"])
    before = model.said()

    def load(count: int) -> None:
        given = json.loads(model.daemon.get("/v2/models/m/config")[1])
        given["instance_group"][0]["count"] = count
        body = json.dumps({"parameters": {"config": json.dumps(given)}}).encode()
        status, answer = model.daemon.request("POST", "/v2/repository/models/m/load", body)
        assert status == 200, answer
        assert model.given() == [count]

    for count in (2, 3):
        load(count)
    group = "m" if source is COMPLETES else "m_0"
    begun = [f"initialize {group}_{number}" for number in range(3)]
    assert model.said() == (before if source is JAX else begun)
    load(2)
    wait_until(lambda: len(model.said()) == (len(before) if source is JAX else 4), "an end", model.daemon)
    assert model.said() == (before if source is JAX else [*begun, f"finalize {group}_2"])


def test_parameters_that_were_pushed_are_gone(counted: Callable[..., Counted]) -> None:
    """What is listed, what answers and what a replaced worker would answer are the same: a load ends what was pushed."""
    model = counted(JAX, GROUP.format(1), control_mode="explicit", load=["m"])
    before = model.said().count("created")
    with tensord_client.connect(model.daemon.url) as client:
        asked = client.model("m", timeout=60)

        def load(count: int) -> float:
            model.config(GROUP.format(count))
            status, answer = model.daemon.request("POST", "/v2/repository/models/m/load", b"{}")
            assert (status, model.given()) == (200, [count]), answer
            return float(asked({"x": np.ones((1, 4), np.float32)})["y"][0, 0])

        asked.parameters.update({"factor": np.float32(5)})
        asked.parameters.update({"factor": np.float32(6)}, set="a")
        assert load(2) == 2
        assert [(each["set"], each["number"]) for each in asked.parameters.list()] == [("main", 0)]
        with pytest.raises(tensord_client.NotFound, match="parameter set 'a' of model 'm' is not found"):
            client.model("m", parameter_set="a")({"x": np.ones((1, 4), np.float32)})
        assert "2 parameter sets that were pushed into it are gone" in model.daemon.log
        assert model.said().count("created") == before + 1
        assert load(3) == 2
        assert model.said().count("created") == before + 1
        # Numbers begin anew, on the worker as well.
        assert asked.parameters.update({"factor": np.float32(7)}) == 1


def test_parameters_that_were_pushed_stay_after_a_failed_load(counted: Callable[..., Counted]) -> None:
    """What is served goes on with them, and takes further ones, until a load succeeds."""
    model = counted(JAX, GROUP.format(1), control_mode="explicit", load=["m"])
    file = model.folder / "models/m/1/model.py"
    source = file.read_text()
    with tensord_client.connect(model.daemon.url) as client:
        asked, other = client.model("m", timeout=60), client.model("m", timeout=60, parameter_set="a")

        def load(content: str) -> int:
            file.write_text(content)
            return model.daemon.request("POST", "/v2/repository/models/m/load", b"{}")[0]

        def answers() -> list[float]:
            return [float(each({"x": np.ones((1, 4), np.float32)})["y"][0, 0]) for each in (asked, other)]

        def numbers() -> dict[str, int]:
            return {each["set"]: each["number"] for each in asked.parameters.list()}

        asked.parameters.update({"factor": np.float32(5)})
        asked.parameters.update({"factor": np.float32(6)}, set="a")
        assert load("raise RuntimeError") != 200
        assert (answers(), numbers()) == ([5, 6], {"main": 1, "a": 1})
        assert asked.parameters.update({"factor": np.float32(7)}) == 2
        assert load("raise ValueError") != 200
        assert (answers(), numbers()) == ([7, 6], {"main": 2, "a": 1})
        asked.parameters.roll_back()
        assert (answers(), numbers()) == ([5, 6], {"main": 1, "a": 1})
        assert load(source) == 200
        assert numbers() == {"main": 0}
        assert float(asked({"x": np.ones((1, 4), np.float32)})["y"][0, 0]) == 2
        assert "2 parameter sets that were pushed into it are gone" in model.daemon.log


def test_one_load_right_behind_another(counted: Callable[..., Counted]) -> None:
    """Each request is answered, whichever version it waits in, and each instance ends once nobody needs it any more."""
    model = counted(TRITON, CONFIG.format(1), control_mode="explicit", load=["m"])
    stop = threading.Event()

    def ask(_: int) -> Counter[int]:
        codes: Counter[int] = Counter()
        while not stop.is_set():
            codes[model.daemon.infer("m", [X])[0]] += 1
        return codes

    file = model.folder / "models/m/1/model.py"
    source = file.read_text()
    with ThreadPoolExecutor(12) as pool:
        asked = pool.map(ask, range(12))
        try:
            for number in range(12):
                count = (3, 1, 2, 1)[number % 4]
                model.config(CONFIG.format(count))
                if number % 3 == 2:
                    file.write_text(f"{source}# {number}\n")
                status, answer = model.daemon.request("POST", "/v2/repository/models/m/load", b"{}")
                assert status == 200, answer
        finally:
            stop.set()
        codes = sum(asked, Counter[int]())
    assert codes.keys() == {200}

    def left() -> Counter[str]:
        said = [each.split() for each in model.said()]
        begun, ended = (Counter(name for word, name in said if word == what) for what in ("initialize", "finalize"))
        return begun - ended

    wait_until(lambda: left() == {"m_0_0": 1}, "the end of all but one instance", model.daemon)


def test_a_failing_instance(counted: Callable[..., Counted]) -> None:
    """The load fails, and the former number goes on."""
    fails = TRITON.replace('note("initialize', 'assert self.name != "m_0_2", "no third"\n        note("initialize')
    model = counted(fails, CONFIG.format(1), control_mode="explicit", load=["m"])
    model.config(CONFIG.format(3))
    status, answer = model.daemon.request("POST", "/v2/repository/models/m/load", b"{}")
    assert (status, b"no third" in answer) == (400, True)
    wait_until(lambda: "finalize m_0_1" in model.said(), "the end of the second one", model.daemon)
    assert model.used().keys() == {"m_0_0"}
    assert model.daemon.get("/v2/models/m/ready")[0] == 200


@pytest.mark.parametrize("source", [HOST, JAX])
def test_functions_after_a_signal(counted: Callable[..., Counted], source: str) -> None:
    """Neither created nor traced again, whether the loop ran it or threads do; a change of its file is a load as ever."""
    model = counted(source)
    x = {**X, "shape": [1, 4]} if source is JAX else X
    before = model.said()
    expected = [2, 4, 6, 8] if source is JAX else [1, 2, 3, 4]
    for number in (3, 2, 1):
        model.config(GROUP.format(number))
        model.daemon.signal(signal.SIGHUP)
        wait_until(lambda number=number: model.given() == [number], f"{number} instances", model.daemon)
        with ThreadPoolExecutor(8) as pool:
            asked = list(pool.map(lambda _: model.daemon.infer("m", [x]), range(32)))
        assert [status for status, _ in asked] == [200] * 32
        assert all(body["outputs"][0]["data"] == expected for _, body in asked)
    assert model.said() == before
    file = model.folder / "models/m/1/model.py"
    file.write_text(re.sub("FACTOR = (.*), 2", r"FACTOR = \1, 3", file.read_text()))
    model.daemon.signal(signal.SIGHUP)
    wait_until(lambda: model.said() != before, "a load", model.daemon)
