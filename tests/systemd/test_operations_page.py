"""Story: somebody follows docs/operations.md, with nothing but a checkout, on a host with a real systemd.

1. Each command of the page's transcripts is run as root, in the order of the page, and has to succeed.
2. What it prints is compared with what the page says, line by line.
3. Of the service that runs then: its first start has compiled nothing, and what belongs to whom is right.

The libraries are those of the tests, so nothing is downloaded.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.daemon_process import ROOT
from tests.installation import needs_compiler
from tests.systemd.machine import Machine, machine

PAGE = ROOT / "docs" / "operations.md"
CHECKOUT = "/srv/tensord"
#: The path of root's shell on Debian: no environment of this host's user.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {
    "PATH": PATH,
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "COLUMNS": "200",
    # What is needed is there, that what builds as well; "0" is how pip wants to hear it.
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}

pytest.importorskip("click_man")  # the page installs it
pytestmark = needs_compiler


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the page and its expected output; a line ``...`` stands for any number of lines."""

    command: str
    printed: tuple[str, ...]


def steps() -> list[Step]:
    found: list[Step] = []
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            mark, _, rest = line.partition(" ")
            if mark == "#":
                found.append(Step(rest, ()))
            elif mark == ">":
                found[-1] = Step(f"{found[-1].command}\n{rest}", ())
            else:
                found[-1] = Step(found[-1].command, (*found[-1].printed, line))
    return found


def pattern(lines: tuple[str, ...]) -> str:
    """Returns what the printed lines have to match: blanks count once, ``...`` is anything within a line, or lines."""
    found = ""
    for line in lines:
        words = (r"\s+".join(map(re.escape, piece.split())) for piece in line.split("..."))
        found += r"(?:.*\n)*?" if line == "..." else r"\s*" + r".*".join(words) + r"\s*\n"
    return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Runs a machine with a checkout, and with the tests' libraries where a service may read them."""
    python = shutil.which("python3", path=PATH)
    version = ["-c", "import sys, ensurepip; print(sys.version_info[:2])"]
    done = subprocess.run([python or "false", *version], capture_output=True, text=True, check=False)
    if done.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip("the system's Python cannot use the libraries of this one")
    checkout = tmp_path_factory.mktemp("checkout") / "tensord"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if not name.startswith(("tests/", "bench/", "examples/", "client/")) and (ROOT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name, follow_symlinks=False)
    libraries = [Path(path) for path in sys.path if Path(path).name == "site-packages"]
    places = [(path, f"/opt/libraries/{number}") for number, path in enumerate(libraries)]
    with machine(tmp_path_factory.mktemp("layer"), [(checkout, CHECKOUT), *places], ENVIRONMENT) as found:
        lines = "".join(f"{place}\\n" for _, place in places)
        found.run(f"mkdir -p /usr/local/sbin; printf '{lines}' > /root/libraries.pth")
        yield found


#: Behind the environment's own packages; its own setuptools is older than what a build would get from an index.
LIBRARIES = """
cp /root/libraries.pth /opt/tensord/venv/lib/python3*/site-packages/
rm -rf /opt/tensord/venv/lib/python3*/site-packages/{setuptools,_distutils_hack,distutils-precedence.pth}
"""


def test_the_page_to_the_letter(host: Machine) -> None:
    """Every transcript of it; where Prometheus is not installed, without those of step 4."""
    followed = steps()
    assert len(followed) > 25
    without, differing = False, []
    for step in followed:
        if step.command.startswith("apt-get"):
            without = host.try_run(f"command -v {step.command.split()[-1]}").returncode != 0
            continue
        if without and re.search(r"prom(tool|etheus)", step.command):
            continue
        done = host.try_run(f"cd {CHECKOUT}\n{step.command}")
        assert done.returncode == 0, f"{step.command}\n{done.stdout}\n{host.journal()}"
        # curl prints answers without an end of line.
        printed = done.stdout if done.stdout.endswith("\n") or not done.stdout else f"{done.stdout}\n"
        if not re.fullmatch(pattern(step.printed), printed):
            expected = "\n".join(step.printed)
            differing.append(f"{step.command}\nprinted:\n{printed}expected:\n{expected}")
        if step.command.startswith("python3 -m venv"):
            host.run(LIBRARIES)
    assert not differing, "\n\n".join(differing)


def test_the_first_start_found_what_the_check_had_compiled(host: Machine) -> None:
    journal = host.run("journalctl -u tensord -o cat")
    made = re.findall(r"(\d+) executables compiled, (\d+) from the cache", journal)
    assert made
    assert {compiled for compiled, _ in made} == {"0"}, journal
    owners = host.run("stat -c '%U %a' /var/cache/tensord; find /var/cache/tensord -type f ! -user tensord")
    assert owners.split("\n") == ["tensord 700", ""]


def test_systemd_warns_of_nothing_but_the_refused_reload(host: Machine) -> None:
    warnings = host.run("journalctl -u tensord -o cat -p warning _PID=1 + UNIT=tensord.service -p warning")
    assert [line for line in warnings.splitlines() if "tensord" in line and "Reload failed" not in line] == []


def test_a_check_finds_what_the_service_could_not_see(host: Machine) -> None:
    """The unit hides root's files, and the check says so where the start would end with status=203/EXEC."""
    host.run("cp -r /opt/tensord /root/")
    done = host.try_run("/root/tensord/venv/bin/python -m tensord check /etc/tensord/tensord.toml")
    assert done.returncode == 2
    assert re.search(
        r"^tensord: tensord\.service cannot use /root/tensord/venv/\S+ \(status=203/EXEC\): install tensord .*\n",
        done.stdout,
        re.MULTILINE,
    )


@pytest.mark.parametrize("key", ["log.file", "trace.file", "supervisor.control_socket"])
def test_a_check_finds_where_the_service_could_not_write(host: Machine, key: str) -> None:
    """
    1. A file outside of the unit's folders, which the service's user could write to but for the sandbox. 2. One in a folder that
    nobody makes. 3. There, with LogsDirectory=.
    Result: the check fails where the start would, and is good where it would be; the daemon that runs is not disturbed.
    """
    section, _, name = key.partition(".")

    def check(path: str) -> tuple[int, str]:
        host.run(
            f'printf \'[repository]\npaths = ["models"]\n[{section}]\n{name} = "{path}"\n\' > /etc/tensord/other.toml'
        )
        done = host.try_run("tensord check --read-only /etc/tensord/other.toml")
        return done.returncode, done.stdout

    host.run("install -d -o tensord /srv/written")
    status, printed = check("/srv/written/file")
    assert (status, "folder '/srv/written': Read-only file system" in printed) == (2, True), printed
    status, printed = check("/var/log/tensord/file")
    assert (status, "there is no folder '/var/log/tensord'" in printed) == (2, True), printed
    drop_in = "/etc/systemd/system/tensord.service.d"
    host.run(
        f"mkdir {drop_in}; printf '[Service]\nLogsDirectory=tensord\n' > {drop_in}/logs.conf; systemctl daemon-reload"
    )
    try:
        status, printed = check("/var/log/tensord/file")
        assert (status, printed.splitlines()[0]) == (0, "as user tensord, in /var/lib/tensord"), printed
    finally:
        host.run(f"rm -r {drop_in} /var/log/tensord; systemctl daemon-reload")
    assert host.run("tensorctl health") == "serving, ready, 1 of 1 models served\n"


def test_the_service_cannot_change_what_it_serves(host: Machine) -> None:
    """Somebody who has got into the daemon has its user and its view of the file system."""
    assert host.run("stat -c '%U %G %a' /var/lib/tensord/models") == "root tensord 750\n"
    daemon = "$(systemctl show --value -p MainPID tensord)"
    inside = f"nsenter --target {daemon} --mount setpriv --reuid tensord --regid tensord --clear-groups"
    host.run(f"{inside} cat /var/lib/tensord/models/first/1/model.py > /dev/null; {inside} touch /var/lib/tensord/own")
    for attempt in (
        "touch /var/lib/tensord/models/first/1/model.py",
        "mkdir /var/lib/tensord/models/second",
        "mv /var/lib/tensord/models /var/lib/tensord/others",
    ):
        assert host.try_run(f"{inside} {attempt}").returncode != 0, attempt
