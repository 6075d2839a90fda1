"""A run that would measure another way to use regions than it says is stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench import regions
from tests.daemon_process import ROOT, DaemonProcess


@pytest.mark.cpu_workers("by what they copy it is known")
@pytest.mark.parametrize(("access", "other"), [("guarded", "snapshot"), ("snapshot", "guarded")])
def test_the_access_is_what_is_said(
    start_daemon: Callable[..., DaemonProcess], capsys: pytest.CaptureFixture[str], access: str, other: str
) -> None:
    identity = {"control_mode": "explicit", "load": ["identity"]}
    daemon = start_daemon(ROOT / "bench" / "models", repository=identity, regions={"access": access})
    daemon.wait_ready()
    regions.check_access(daemon.url, access)
    assert f"{access}: {0 if access == 'guarded' else 32} MiB copied" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=f"regions are not {other}"):
        regions.check_access(daemon.url, other)
