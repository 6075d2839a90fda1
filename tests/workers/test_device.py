"""Names of devices, and what of the host each may see."""

from __future__ import annotations

import os

import pytest

from workers.device import DeviceName


def test_names() -> None:
    assert DeviceName.parse("cpu:0") == DeviceName("cpu", 0)
    assert str(DeviceName.parse("cuda:12")) == "cuda:12"
    assert (DeviceName("cpu", 3).gpu, DeviceName("cuda", 3).gpu) == (None, 3)
    for text in ("", "cpu", "cpu:", "cpu:-1", "tpu:0", "cpu:0 ", "cuda:1x", "cuda:99999"):
        with pytest.raises(ValueError, match="expected cpu:N or cuda:N"):
            DeviceName.parse(text)


@pytest.mark.parametrize(
    ("device", "visible", "platforms", "chosen"),
    [
        ("cpu:1", "0,1", "cpu", "0,1"),
        ("cuda:1", "", "cuda", "1"),
        ("cuda:1", "GPU-aa,GPU-bb", "cuda", "GPU-bb"),
        ("cuda:0", "3", "cuda", "3"),
    ],
)
def test_environment(monkeypatch: pytest.MonkeyPatch, device: str, visible: str, platforms: str, chosen: str) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    DeviceName.parse(device).prepare_environment()
    assert os.environ["JAX_PLATFORMS"] == platforms
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen
