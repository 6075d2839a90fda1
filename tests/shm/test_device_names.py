"""Tests that what depends on a GPU is found by any of its workers' names."""

from __future__ import annotations

import pytest

from tensord.shm import device_names


@pytest.mark.parametrize(("device", "gpu"), [("cpu:0", ""), ("cuda:1", "cuda:1"), ("cuda:12/3", "cuda:12")])
def test_the_gpu_of_a_device(device: str, gpu: str) -> None:
    assert device_names.gpu_of(device) == gpu
    if gpu:
        assert device_names.name(device_names.number_of(gpu), int(device.partition("/")[2] or 0)) == device


@pytest.mark.parametrize(("device", "alone"), [("cpu:3", "cpu:3#m"), ("cuda:1", "cuda:1#m"), ("cuda:1/2", "cuda:1#m")])
def test_the_worker_of_one_model_alone(device: str, alone: str) -> None:
    assert device_names.alone(device, "m") == alone
    assert (device_names.model_of(alone), device_names.model_of(device)) == ("m", "")
    assert (device_names.gpu_of(alone), device_names.shared(alone)) == (device_names.gpu_of(device), alone[:-2])
    assert device_names.shared(device) == device
