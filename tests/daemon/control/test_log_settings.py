"""Log settings: what is given changes, everything is told, nothing is told twice."""

from __future__ import annotations

import json

from tensord.config.options import Log
from tensord.daemon.control.log_settings import LogSettings
from tensord.shm.operations import ChangeLog

FIRST = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


def test_changes_are_published_and_described() -> None:
    published: list[Log] = []
    settings = LogSettings(Log(), published.append)
    assert list(json.loads(settings.change(ChangeLog())).items()) == list(FIRST.items())
    assert published == []
    answer = json.loads(settings.change(ChangeLog(info=False, verbose=2, format="ISO8601")))
    assert answer == FIRST | {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert published == [Log(info=False, verbose=2, format="ISO8601")]
    settings.change(ChangeLog(info=False))
    assert len(published) == 1
    settings.replace(Log())
    assert published[1:] == [Log()]


def test_a_file_is_told_and_kept() -> None:
    settings = LogSettings(Log(file="/var/log/x"), lambda _: None)
    assert json.loads(settings.change(ChangeLog(error=False)))["log_file"] == "/var/log/x"
