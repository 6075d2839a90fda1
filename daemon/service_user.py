"""Lets root run ``tensord check`` as the user of the installed service tensord.service, or as another user.

As the service's user, which is the default, the check runs in a sandbox that systemd makes with the service's settings.
As another user, whom root names with ``--user``, the check runs in this process, which switches to that user.
"""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensord.config import accounts

UNIT = "tensord.service"
#: The variable with the caller's working directory, for a check that runs in the sandbox already.
INSIDE = "_TENSORD_CHECKED_FROM"
_PROPERTIES = ("LoadState", "User", "WorkingDirectory", "FragmentPath", "DropInPaths")
#: Settings of a service that are about its own process, and not about where it runs: they begin so.
_OF_PROCESS = (
    *("BusName=", "Exec", "FileDescriptorStore", "GuessMainPID=", "NotifyAccess=", "PIDFile=", "RemainAfterExit="),
    *("Restart", "Sockets=", "Standard", "SuccessExitStatus=", "Timeout", "Type=", "Watchdog"),
)
#: Variables that name places of the one who asks, which another user does not have.
_OWN_PLACES = ("TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME")
#: Seconds within which systemd answers.
_TIMEOUT = 10.0
#: Exit statuses from here on are systemd's own: it could not run the program; and the one for a program that it does not find.
_OF_SYSTEMD, _NO_EXEC = 200, 203
#: The exit status of a check inside of the sandbox that found a model which cannot be served: systemd-run itself fails with 1.
BAD = 100


class Unusable(Exception):
    """Raised if ``tensord check`` cannot run as the requested user, or in the service's sandbox."""


@dataclass(frozen=True, slots=True)
class Service:
    """Says how systemd runs the service: as which user, in which working directory, and with which settings."""

    user: str
    #: "": the root of the file system.
    folder: str = ""
    #: Settings as unit files have them, such as ``ProtectSystem=strict``, in their order.
    settings: tuple[str, ...] = ()


def installed() -> Service | None:
    """Returns how systemd runs tensord.service. Returns None if the service is not installed or systemctl fails.

    Raises Unusable if a unit file that systemd has read is not readable any more.
    """
    command = ["systemctl", "show", UNIT, *(f"--property={name}" for name in _PROPERTIES)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    if done.returncode != 0 or found.get("LoadState") != "loaded":
        return None
    files = [found.get("FragmentPath", ""), *shlex.split(found.get("DropInPaths", ""))]
    try:
        texts = [Path(file).read_text(errors="replace") for file in filter(None, files)]
    except OSError as error:
        told = f"cannot be read: {error.strerror}; `systemctl daemon-reload` has systemd look at what is there"
        raise Unusable(f"'{error.filename}', of which systemd says that it is a file of {UNIT}, {told}") from None
    return Service(
        found.get("User") or "root",
        # "!" before it: it may be missing.
        found.get("WorkingDirectory", "").removeprefix("!"),
        tuple(setting for text in texts for setting in settings(text)),
    )


def settings(unit: str) -> list[str]:
    """Returns the lines KEY=VALUE of the section [Service] in a systemd unit file, such as "User=tensord".

    Settings that only concern the service's own process, such as ExecStart=, are left out. ``unit``: the text of the unit file.
    """
    found, section = [], ""
    for line in map(str.strip, unit.replace("\\\n", " ").splitlines()):
        if line.startswith("["):
            section = line
        elif section == "[Service]" and "=" in line and not line.startswith(("#", ";")):
            setting = "=".join(map(str.strip, line.split("=", 1)))
            found += [] if setting.startswith(_OF_PROCESS) else [setting]
    return found


def check_inside(service: Service, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs ``tensord check`` in a sandbox with the settings of the service. Returns the exit status of the check.

    Args:
      words: the arguments of ``tensord check``. The path of the configuration file is relative to the caller's working
        directory. All other paths are relative to the service's working directory.
      environment: the caller's variables. Those whose names begin with TENSORD_ are passed on.
    Raises Unusable if systemd could not start the check in the sandbox, or if the check did not come to its end.
    """
    unit = f"tensord-check-{os.getpid()}.service"
    variables = {name: value for name, value in environment.items() if name.startswith("TENSORD_")}
    # systemd would remove the folder of the daemon that runs now.
    given = [*service.settings, "RuntimeDirectoryPreserve=yes"]
    command = [
        *("systemd-run", "--quiet", "--wait", "--pipe", "--collect", f"--unit={unit}"),
        *(f"--property={setting}" for setting in given),
        *(f"--setenv={name}={value}" for name, value in {**variables, INSIDE: os.getcwd()}.items()),
        *("--", sys.executable, "-P", "-m", "tensord", "check", *words),
    ]
    try:
        status = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        subprocess.run(["systemctl", "stop", unit], check=False)
        raise
    if status == _NO_EXEC:
        raise Unusable(
            f"{UNIT} cannot use {sys.executable} (status=203/EXEC): install tensord and its Python where it can; what is beneath "
            "/home and /root is hidden by ProtectHome=, unless a drop-in says read-only"
        )
    if status >= _OF_SYSTEMD:
        raise Unusable(f"systemd cannot run a process as {UNIT} does: status={status} (systemd.exec(5) names it)")
    if status == 1:  # systemd-run's own, or that of a Python that ended by an exception
        raise Unusable(f"the check as {UNIT} did not come to its end; what is written above, or the journal, says why")
    return 1 if status == BAD else status


def become(name: str) -> None:
    """Switches this process, which must run as root, to the user ``name``, with the user's groups and home directory.

    Environment variables that name the caller or the caller's directories are replaced or removed.
    Raises Unusable if the user does not exist, or cannot use this Python or the working directory.
    """
    try:
        user = pwd.getpwuid(accounts.user_id(name))
    except (KeyError, OverflowError):
        raise Unusable(f"there is no user or group {name!r} on this host") from None
    for variable in _OWN_PLACES:
        os.environ.pop(variable, None)
    os.environ |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
    os.initgroups(user.pw_name, user.pw_gid)
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    os.umask(0o027)
    folder = os.getcwd()
    if not os.access(folder, os.X_OK):
        raise Unusable(f"user {user.pw_name} cannot enter the working directory {folder}")
    for needed in map(os.path.realpath, (sys.executable, __file__)):
        if not os.access(needed, os.R_OK):
            place = Path(needed).parent
            raise Unusable(f"user {user.pw_name} cannot use {place}: install tensord and its Python where it can")
