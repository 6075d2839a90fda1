"""What of a new configuration comes into force while the daemon runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensord.config.layers import ConfigurationError
from tensord.config.options import Http, Log, Options, Repository
from tensord.daemon.operator.configuration import Configuration

OLD = Options(repository=Repository(paths=("old",)), http=Http(port=1))


async def test_the_repository_changes_and_what_needs_a_restart_is_said(caplog: pytest.LogCaptureFixture) -> None:
    new = Options(repository=Repository(paths=("new",)), http=Http(port=2))
    configuration = Configuration(OLD, lambda: new)
    assert await configuration.read() == new
    assert configuration.options == OLD
    assert configuration.take(new) == 2
    assert configuration.options.repository.paths == ("new",)
    assert configuration.options.http.port == 1
    assert "these keys need a restart" in caplog.text
    assert "http.port" in caplog.text
    assert "repository.paths" not in caplog.text


async def test_what_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    def wrong() -> Options:
        raise ConfigurationError("port: 70000")

    configuration = Configuration(OLD, wrong)
    with pytest.raises(ConfigurationError, match="70000"):
        await configuration.read()
    nowhere = Options(log=Log(file=str(tmp_path / "missing" / "log")))
    with pytest.raises((OSError, ConfigurationError)):
        await Configuration(OLD, lambda: nowhere).read()
    assert configuration.options == OLD


def test_the_log_is_taken_by_itself() -> None:
    configuration = Configuration(OLD, lambda: OLD)
    configuration.take_log(Log(verbose=3))
    assert configuration.options.log.verbose == 3
    assert configuration.options.http == OLD.http
