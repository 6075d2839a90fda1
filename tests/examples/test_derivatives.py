"""The examples of derivatives of served models."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

from tests.daemon_process import DaemonOf, DaemonProcess
from tests.examples.models import ROOT, load

pytestmark = pytest.mark.xdist_group("examples")
FOLDER = ROOT / "examples" / "derivatives"


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("derivatives")
    return daemon_of(FOLDER / "models", {"clients": {"socket": str(folder / "clients.sock")}}, folder=folder)


def numbers(address: str, program: str, pattern: str) -> list[float]:
    """Runs an example, which must end with 0; returns the numbers that ``pattern`` finds in its output."""
    command = [sys.executable, str(FOLDER / program), "--url", address]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout
    found = re.search(pattern, ended.stdout)
    assert found is not None, ended.stdout
    return [float(number) for number in found.groups()]


def test_the_friction_of_a_pendulum_is_found(daemon: DaemonProcess) -> None:
    (friction,) = numbers(daemon.url, "pendulum.py", r"a friction of (\d\.\d+) was found")
    assert abs(friction - 0.35) < 0.01


def test_a_posterior_is_sampled(daemon: DaemonProcess) -> None:
    """It is a normal distribution, whose mean and deviations are known."""
    pytest.importorskip("blackjax")
    places, measured = load("examples/derivatives/models/likelihood")[0].measured()
    lines = np.stack([np.ones_like(places), places], 1) / 0.5
    covariance = np.linalg.inv(lines.T @ lines + np.eye(2) / 100)
    means, deviations = covariance @ lines.T @ measured / 0.5, np.sqrt(np.diag(covariance))
    number = r"(-?\d\.\d+) \+- (\d\.\d+)"
    found = numbers(daemon.url, "sampling.py", rf"offset {number}\s+slope {number}")
    np.testing.assert_allclose(found[::2], means, atol=0.2 * deviations.max())
    np.testing.assert_allclose(found[1::2], deviations, rtol=0.2)


def test_a_car_is_parked_by_plans(daemon: DaemonProcess) -> None:
    address = daemon.sections["clients"]["socket"]
    (plans, away) = numbers(address, "planning.py", r"(\d+) plans, [^$]*parked (\d\.\d+) m from the target")
    assert plans == 300
    assert away < 0.1
