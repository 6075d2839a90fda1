"""Tests what of a new configuration comes into force while the daemon runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensord.config.layers import ConfigurationError, Configured
from tensord.config.options import Http, Log, Options, Repository
from tensord.daemon.operator.configuration import Configuration
from tensord.shm.operations import ChangeLog

LOG = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
OLD = Configured(Options(repository=Repository(paths=("old",)), http=Http(port=1)), {"http.port": "old.toml"})


def untold(changed: Log) -> None:
    """Takes the place of processes to which nothing is told."""


async def test_the_repository_changes_and_what_needs_a_restart_is_said(caplog: pytest.LogCaptureFixture) -> None:
    options = Options(repository=Repository(paths=("new",), required=("m",)), http=Http(port=2))
    new = Configured(options, {"http.port": "--http-port", "repository.paths": "new.toml"})
    configuration = Configuration(OLD, lambda: new, untold)
    assert await configuration.read() == new
    assert configuration.options == OLD.options
    assert configuration.take(new) == 3
    assert configuration.options.repository == options.repository
    assert configuration.options.http.port == 1
    assert "these keys need a restart" in caplog.text
    assert "http.port" in caplog.text
    assert "repository.paths" not in caplog.text


async def test_what_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    def wrong() -> Configured:
        raise ConfigurationError("port: 70000")

    configuration = Configuration(OLD, wrong, untold)
    with pytest.raises(ConfigurationError, match="70000"):
        await configuration.read()
    nowhere = Configured(Options(log=Log(file=str(tmp_path / "missing" / "log"))), {})
    with pytest.raises((OSError, ConfigurationError)):
        await Configuration(OLD, lambda: nowhere, untold).read()
    assert configuration.options == OLD.options


def test_changes_of_the_log_are_published_and_described() -> None:
    """A client's change of log settings changes what it names and is published once; a reload without changes publishes none."""
    published: list[Log] = []
    configuration = Configuration(OLD, lambda: OLD, published.append)
    assert list(json.loads(configuration.change_log(ChangeLog())).items()) == list(LOG.items())
    assert published == []
    answer = json.loads(configuration.change_log(ChangeLog(info=False, verbose=2, format="ISO8601")))
    assert answer == LOG | {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert published == [Log(info=False, verbose=2, format="ISO8601")] == [configuration.options.log]
    configuration.change_log(ChangeLog(info=False))
    assert len(published) == 1
    for _ in range(2):
        configuration.take(OLD)
        assert published[1:] == [Log()] == [configuration.options.log]
    assert configuration.options.http == OLD.options.http


def test_a_log_file_is_told_and_kept() -> None:
    configuration = Configuration(Configured(Options(log=Log(file="/var/log/x")), {}), lambda: OLD, untold)
    assert json.loads(configuration.change_log(ChangeLog(error=False)))["log_file"] == "/var/log/x"


async def test_what_is_in_force_and_what_waits() -> None:
    options = Options(repository=Repository(paths=("new",)), http=Http(port=2))
    file = [OLD]
    configuration = Configuration(OLD, lambda: file[0], untold)

    async def found() -> dict[str, dict[str, object]]:
        return {row.pop("key"): row for row in (await configuration.described())["keys"]}

    assert (await found())["http.port"] == {"value": 1, "source": "old.toml"}
    assert (await found())["grpc.port"] == {"value": 8001, "source": "default"}
    file[0] = Configured(options, {"http.port": "new.toml", "repository.paths": "new.toml"})
    waiting = {key: row for key, row in (await found()).items() if "waits" in row}
    assert waiting == {
        "repository.paths": {"value": ("old",), "source": "default", "next": ("new",), "waits": "reload"},
        "http.port": {"value": 1, "source": "old.toml", "next": 2, "waits": "restart"},
    }
    configuration.take(file[0])
    waiting = {key: row for key, row in (await found()).items() if "waits" in row}
    assert waiting == {"http.port": {"value": 1, "source": "old.toml", "next": 2, "waits": "restart"}}
    assert (await found())["repository.paths"] == {"value": ("new",), "source": "new.toml"}
    configuration.change_log(ChangeLog(verbose=1))
    assert (await found())["log.verbose"]["source"] == "changed while running"


async def test_secrets_are_not_described() -> None:
    secret, other = (Options(http=Http(restricted_api=(f"trace:k={value}",))) for value in ("sesame", "simsim"))
    rows = (await Configuration(Configured(secret, {}), lambda: Configured(other, {}), untold).described())["keys"]
    (row,) = (row for row in rows if "waits" in row)
    assert (row["key"], row["value"], row["next"]) == ("http.restricted_api", ("trace:k=...",), ("trace:k=...",))


async def test_a_file_that_a_reload_would_refuse_is_said() -> None:
    def wrong() -> Configured:
        raise ConfigurationError("tensord.toml: http.port: expected int")

    assert (await Configuration(OLD, wrong, untold).described())["error"] == "tensord.toml: http.port: expected int"
