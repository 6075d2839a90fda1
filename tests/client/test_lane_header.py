"""include/tensord_lane.h: its examples are compiled without a warning, and asked for answers of a real daemon."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tensord.shm import channel, messages, prepared
from tests.client.conftest import clients_socket
from tests.daemon_process import ROOT, DaemonProcess

_CLIENT = ROOT / "client"
_STRICT = ("-O2", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


def compiled(folder: Path, source: Path, compiler: str, *flags: str) -> str:
    target = folder / source.stem
    command = [compiler, *flags, *_STRICT, f"-I{_CLIENT / 'include'}", str(source), "-o", str(target)]
    subprocess.run(command, check=True, timeout=300)
    return str(target)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_headers_describe_the_edition_that_the_daemon_speaks() -> None:
    records = (ROOT / "shm/common/tensord_wire.h").read_text()
    for name, value in (
        ("TENSORD_WIRE", messages.WIRE_VERSION),
        ("TENSORD_MAX_DATAGRAM", channel.MAX_DATAGRAM),
        ("TENSORD_MAX_NUMBERS", prepared.MAX_NUMBERS),
        ("TENSORD_TIMING", messages.TIMING),
    ):
        assert re.search(rf"#define {name} {value}\b", records)
    assert f'["V", {messages.WIRE_VERSION}]' in records
    assert f'"wire": {messages.WIRE_VERSION}' in (_CLIENT / "include/tensord_lane.h").read_text()


@pytest.mark.parametrize(("compiler", "flag", "suffix"), [("cc", "-std=c11", "c"), ("c++", "-std=c++17", "cpp")])
def test_it_is_a_header_for_both_languages(tmp_path: Path, compiler: str, flag: str, suffix: str) -> None:
    source = tmp_path / f"alone.{suffix}"
    source.write_text("#include <tensord_lane.h>\n#include <tensord_lane.h>\nint main(void) { return 0; }\n")
    compiled(tmp_path, source, compiler, flag, "-Wpedantic")


def test_the_example_in_c(tmp_path: Path, daemon: DaemonProcess) -> None:
    program = compiled(tmp_path, _CLIENT / "examples/lane.c", "cc", "-std=c11")
    done = run(program, clients_socket(daemon.folder), "3000")
    assert done.returncode == 0, done.stderr
    assert "OUTPUT0[0] = 1000\n" in done.stdout
    assert "OUTPUT1[0] = 998\n" in done.stdout
    assert re.search(r"INVALID_ARGUMENT: .*INPUT1", done.stdout)
    assert "3000 calls, the median took" in done.stdout
    nobody = run(program, str(tmp_path / "nobody.sock"))
    assert nobody.returncode == 1
    assert "no tensord serves at" in nobody.stderr


@pytest.mark.release("a compiler of C++ takes longest; test_the_example_in_c compiles the same header")
def test_the_node_for_ros2(tmp_path: Path, daemon: DaemonProcess) -> None:
    """Against a stand-in of rclcpp: images with padded rows, one of another kind among them."""
    source = _CLIENT / "examples/ros2_node.cpp"
    program = compiled(tmp_path, source, "c++", "-std=c++17", f"-I{ROOT / 'tests/client/ros2'}")
    parameters = {"socket": clients_socket(daemon.folder), "model": "brightness", "height": 6, "width": 8, "images": 5}
    done = run(program, "--ros-args", *[f"{name}:={value}" for name, value in parameters.items()])
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split("\n") if line] == [1.0, 2.0, 4.0, 5.0]
    assert "warn an image of another kind" in done.stderr
    other = run(program, *[f"{name}:={value}" for name, value in (parameters | {"model": "nowhere"}).items()])
    assert other.returncode == 1
    assert "nowhere" in other.stderr
