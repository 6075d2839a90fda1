"""Which devices get a worker, on hosts with and without GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from config.core_list import describe
from config.options import Workers
from daemon.devices import NoDevice, find_devices


def host(tmp_path: Path, gpus: int) -> Path:
    for name in [*(f"nvidia{i}" for i in range(gpus)), *(("nvidiactl", "nvidia-uvm") if gpus else ())]:
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("device", "gpus", "variable", "expected"),
    [
        ("auto", 0, None, [("cpu:0", None), ("cpu:1", None)]),
        ("auto", 2, None, [("cuda:0", "0"), ("cuda:1", "1")]),
        ("auto", 2, "1", [("cuda:0", "1")]),
        ("auto", 2, "GPU-abc, MIG-def", [("cuda:0", "GPU-abc"), ("cuda:1", "MIG-def")]),
        ("auto", 2, "", [("cpu:0", None), ("cpu:1", None)]),
        ("auto", 2, "-1", [("cpu:0", None), ("cpu:1", None)]),
        ("auto", 0, "0,1", [("cpu:0", None), ("cpu:1", None)]),
        ("cpu", 2, None, [("cpu:0", None), ("cpu:1", None)]),
        ("cuda", 1, None, [("cuda:0", "0")]),
    ],
)
def test_devices(
    tmp_path: Path, device: str, gpus: int, variable: str | None, expected: list[tuple[str, str | None]]
) -> None:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    found = find_devices(Workers(device=device, cpu=2), environment, host(tmp_path, gpus))  # type: ignore[arg-type]
    assert [(one.name, one.environment.get("CUDA_VISIBLE_DEVICES")) for one in found] == expected


def test_cores_that_are_not_ours_are_named_with_those_that_are(tmp_path: Path) -> None:
    ours = sorted(os.sched_getaffinity(0))
    cores = (str(ours[0]), f"{ours[0]},8190-8191")
    with pytest.raises(NoDevice) as caught:
        find_devices(Workers(device="cpu", cpu=2, cores=cores), {}, tmp_path)
    text = str(caught.value)
    assert f"worker 1 is to run on cores {ours[0]},8190-8191, but of those 8190-8191 cannot be used" in text
    assert text.endswith(f"this process may use {describe(ours)}")
    assert len(find_devices(Workers(device="cpu", cpu=2, cores=cores[:1] * 2), {}, tmp_path)) == 2


def test_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(NoDevice, match=r'workers\.device is "cuda"'):
        find_devices(Workers(device="cuda"), {}, tmp_path)
