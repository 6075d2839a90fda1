"""Runs a machine with a real systemd: this host's files with a writable layer on top, and namespaces for everything else.

    unshare (processes, mounts, network, names, IPC, control groups) ─▶ overlay of / ─▶ systemd as its first process
    Machine.run ─▶ nsenter ─▶ a shell there, as root

Its network is a loopback alone. The host's own services are not started there, nor anything that changes the kernel's settings.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.daemon_process import PATIENCE

_SYSTEMD = "/usr/lib/systemd/systemd"
_PROGRAMS = ("unshare", "nsenter", "systemctl", "mount", "umount", "pivot_root")
#: Units that reach the kernel or a terminal, and so this host.
_MASKED = (
    *("systemd-udevd", "systemd-udev-trigger", "systemd-udev-settle", "systemd-sysctl", "systemd-modules-load"),
    *("systemd-remount-fs", "systemd-networkd", "systemd-resolved", "systemd-timesyncd", "systemd-random-seed"),
    *("console-getty", "getty@", "systemd-logind", "systemd-hwdb-update", "kmod-static-nodes", "systemd-binfmt"),
)
#: $1 a folder for mounts; then pairs: what is mounted, and where in the machine.
_BOOT = f"""
set -e
place=$1
shift
mount --make-rprivate /
mount -t tmpfs tmpfs "$place"
cd "$place"
mkdir up work root
mount -t overlay overlay -o lowerdir=/,upperdir=up,workdir=work root
cd root
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for folder in run tmp root home dev mnt; do mount -t tmpfs tmpfs $folder; done
chmod 1777 tmp
for device in null zero full random urandom tty; do touch dev/$device; mount --bind /dev/$device dev/$device; done
mkdir dev/shm dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t devpts devpts dev/pts -o newinstance,ptmxmode=0666
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
touch dev/console
mount --bind /dev/null dev/console
while [ $# -gt 0 ]; do
    mkdir -p ".$2"
    mount --rbind "$1" ".$2"
    shift 2
done
rm -rf etc/systemd/system/*.wants etc/systemd/system/tensord* usr/lib/sysusers.d/tensord.conf usr/lib/tmpfiles.d/tensord.conf
rm -rf opt/tensord etc/tensord var/lib/tensord var/cache/tensord var/lib/systemd/timers var/log/journal
for unit in {" ".join(_MASKED)}; do ln -sf /dev/null etc/systemd/system/$unit.service; done
mkdir .before
pivot_root . .before
umount -l /.before
rmdir /.before
printf 'machine\\n' > /etc/hostname
: > /etc/fstab
exec env -i container=tests PATH=/usr/sbin:/usr/bin:/sbin:/bin {_SYSTEMD} --system --log-target=null --show-status=no
"""


class Machine:
    """A running machine; ``run`` is root's shell there."""

    def __init__(self, process: subprocess.Popen[bytes], environment: Mapping[str, str]) -> None:
        self._process = process
        self._environment = environment
        self._first = 0

    def wait_booted(self) -> None:
        """Waits until systemd has booted. Skips the test where this host does not allow it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                pytest.skip(f"this host has no namespaces for a systemd: exit status {self._process.returncode}")
            for child in psutil.Process(self._process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.name() == "systemd":
                        self._first = child.pid
            if self._first:
                done = self.try_run("systemctl is-system-running --wait")
                if done.stdout.strip() in ("running", "degraded"):
                    return
            time.sleep(0.2)
        pytest.skip("systemd does not come up in namespaces of this host")

    def try_run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Runs a shell script; returns its exit status, and both outputs in ``stdout``."""
        return subprocess.run(
            # A folder of this host's is none there, which bash would say.
            ["nsenter", "--target", str(self._first), "--all", "/bin/sh", "-c", 'cd / && exec bash -c "$0"', script],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )

    def run(self, script: str) -> str:
        """Runs a shell script that has to succeed; returns both of its outputs."""
        done = self.try_run(f"set -e\n{script}")
        assert done.returncode == 0, f"{script}\n{done.stdout}{self.journal()}"
        return done.stdout

    def journal(self) -> str:
        """Returns the last lines of the service's log, and its status."""
        return self.try_run(
            "journalctl --no-pager -n 60 -u 'tensord*' 2>&1; systemctl status --no-pager 'tensord*' 2>&1"
        ).stdout


def _control_group() -> Path | None:
    """Makes a control group for a machine; None: this host has no writable control groups of version 2."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            mine = Path("/proc/self/cgroup").read_text().partition("0::/")[2].splitlines()[0]
            found = Path(where, mine, f"tensord-test-{os.getpid()}")
            with contextlib.suppress(OSError):
                found.mkdir()
                return found
    return None


@contextlib.contextmanager
def machine(folder: Path, mounts: Sequence[tuple[Path, str]], environment: Mapping[str, str]) -> Iterator[Machine]:
    """Runs a machine within the block. Skips the test where this host does not allow it.

    Args:
      folder: an empty one, for the writable layer.
      mounts: folders that the machine sees besides this host's root file system, and where.
      environment: variables of its shells.
    """
    missing = [name for name in (*_PROGRAMS, _SYSTEMD) if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"a machine needs root, and {', '.join(missing) or 'namespaces'}")
    group = _control_group()
    if group is None:
        pytest.skip("there is no control group of version 2 for a systemd")
    pairs = [str(word) for pair in mounts for word in pair]
    enter = f'echo $$ > {shlex.quote(str(group / "cgroup.procs"))} && exec "$@"'
    unshare = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--cgroup", "--fork", "--kill-child"]
    process = subprocess.Popen(
        ["/bin/sh", "-c", enter, "sh", *unshare, "/bin/bash", "-c", _BOOT, "boot", str(folder), *pairs],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        found = Machine(process, environment)
        found.wait_booted()
        yield found
    finally:
        # With its first process all others of its namespace end.
        process.send_signal(signal.SIGKILL)
        process.wait()
        _remove(group)


def _remove(group: Path) -> None:
    """Removes a control group and those in it, once their processes are gone."""
    deadline = time.monotonic() + PATIENCE
    while group.exists() and time.monotonic() < deadline:
        for each in sorted(group.rglob("*"), key=lambda path: len(path.parts), reverse=True):
            if each.is_dir():
                with contextlib.suppress(OSError):
                    each.rmdir()
        with contextlib.suppress(OSError):
            group.rmdir()
        time.sleep(0.05)
