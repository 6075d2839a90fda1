"""What depends on a GPU is found by any of its workers' names."""

from __future__ import annotations

import pytest

from tensord.shm import device_names


@pytest.mark.parametrize(("device", "gpu"), [("cpu:0", ""), ("cuda:1", "cuda:1"), ("cuda:12/3", "cuda:12")])
def test_the_gpu_of_a_device(device: str, gpu: str) -> None:
    assert device_names.gpu_of(device) == gpu
    if gpu:
        assert device_names.name(device_names.number_of(gpu), int(device.partition("/")[2] or 0)) == device
