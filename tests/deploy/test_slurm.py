"""deploy/slurm, run by a Slurm of this host: its controller and one node, which the test starts.

apt-get install slurm-wlm, and run as root: Slurm's node starts jobs as other users
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensord_client

from tests.daemon_process import PATIENCE, ROOT, wait_until
from tests.repositories import scale_model

DEPLOY = ROOT / "deploy" / "slurm"
NODE = socket.gethostname().partition(".")[0]
SLURM = [shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") for name in ("slurmctld", "slurmd", "sbatch")]
with_slurm = pytest.mark.skipif(
    None in SLURM or os.geteuid() != 0, reason="Slurm is not installed (apt-get install slurm-wlm), or this is not root"
)
CONFIGURATION = """
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={ctld}
SlurmdPort={slurmd}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName={node} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A Slurm cluster of one node. ``run`` runs one of Slurm's commands on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TENSORD", "SLURM"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TENSORD_CONFIG": str(folder / "tensord.toml"),
            "ADDRESSES": str(folder / "addresses"),
            "PORT": str(free_ports(1)[0]),
            "DRAIN_TIME": "0.2",
        }

    def run(self, *command: object, **variables: str) -> str:
        done = subprocess.run(
            [*map(str, command)],
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def jobs(self) -> list[str]:
        """Returns the jobs that wait, run or are ending."""
        return self.run("squeue", "--noheader", "--format", "%A").split()


def free_ports(count: int) -> list[int]:
    """Returns ports that no process uses at the moment."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    models = scale_model(tmp_path / "models")
    ctld, slurmd = free_ports(2)
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    (tmp_path / "slurm.conf").write_text(CONFIGURATION.format(node=NODE, folder=tmp_path, ctld=ctld, slurmd=slurmd))
    (tmp_path / "tensord.toml").write_text(
        f'[repository]\npaths = ["{models}"]\n[workers]\ndevice = "cpu"\npin = false\nidle_timeout = {PATIENCE}\n'
        "[grpc]\nenabled = false\n[metrics]\nport = 0\n[expert]\nstart_timeout = 240.0\n"
    )
    for name in ("tensord.sbatch", "clients.sbatch", "find_tensord.py"):
        shutil.copy(DEPLOY / name, tmp_path)
    started = Cluster(tmp_path)
    with open(tmp_path / "slurm.log", "w") as log:
        parts = [
            subprocess.Popen([str(program), "-D"], env=started.environment, cwd=tmp_path, stdout=log, stderr=log)
            for program in SLURM[:2]
        ]
        try:
            wait_until(lambda: _idle(started), f"a node of Slurm: {(tmp_path / 'slurm.log').read_text()}")
            yield started
            for job in started.jobs():
                started.run("scancel", job)
            wait_until(lambda: not started.jobs(), "end of the jobs")
        finally:
            for part in parts:
                part.terminate()
            for part in parts:
                part.wait()


def _idle(cluster: Cluster) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--format", "%t"], env=cluster.environment, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() == "idle"


@with_slurm
def test_daemons_clients_and_the_end_of_a_job(cluster: Cluster) -> None:
    """A job's daemon is found by an array of clients, and ends in good order when Slurm says that its time is over.

    1. its address is in a file once it is ready;
    2. each client of the array asks the one on its own node, over a lane; others ask over HTTP;
    3. the signal before the end of the job: the address goes, what is under way is answered, the job ends with 0.
    """
    job = cluster.run("sbatch", "--parsable", "--output=daemon.log", "tensord.sbatch").strip()
    address = cluster.folder / "addresses" / NODE
    wait_until(address.exists, "the daemon's address")
    host_and_port, sockets = address.read_text().splitlines()
    assert host_and_port == f"{NODE}:{cluster.environment['PORT']}"
    assert sockets.startswith(f"{os.environ.get('TMPDIR', '/tmp')}/tensord-{job}-")
    cluster.run("sbatch", "--wait", "--array=0-1", "--output=client-%a.log", "clients.sbatch")
    for task in (0, 1):
        assert f"<LaneConnection {sockets}/clients.sock" in (cluster.folder / f"client-{task}.log").read_text()
    found = cluster.run(sys.executable, "find_tensord.py", SLURMD_NODENAME="another")
    assert re.search(rf"<HttpConnection to http://\S+:{cluster.environment['PORT']}>", found)
    with tensord_client.connect(sockets) as client:
        assert float(client.model("scale")({"x": np.ones((1, 4), np.float32)})["y"][0, 0]) == 4
    (signal,) = re.findall(r"^#SBATCH --signal=(\w+)@\d+$", (DEPLOY / "tensord.sbatch").read_text(), re.MULTILINE)
    # What Slurm does then, as --signal without B: says: to the steps, and not to the batch shell.
    cluster.run("scancel", f"--signal={signal}", job)
    wait_until(lambda: job not in cluster.jobs(), "the end of the job")
    log = (cluster.folder / "daemon.log").read_text()
    assert log.index("draining: new requests are refused") < log.index("drained: nothing is in flight")
    assert log.rstrip().endswith("stopped")
    assert not address.exists()
    assert not Path(sockets).exists()
    assert "JobState=COMPLETED" in cluster.run("scontrol", "show", "job", job)


@with_slurm
def test_a_job_that_is_cancelled(cluster: Cluster) -> None:
    """Everything of a step gets SIGTERM then, and the daemon stops in good order as well."""
    job = cluster.run("sbatch", "--parsable", "--output=daemon.log", "tensord.sbatch").strip()
    address = cluster.folder / "addresses" / NODE
    wait_until(address.exists, "the daemon's address")
    cluster.run("scancel", job)
    wait_until(lambda: job not in cluster.jobs(), "the end of the job")
    assert "stopped" in (cluster.folder / "daemon.log").read_text()
    assert not address.exists()


@with_slurm
def test_a_daemon_that_does_not_start(cluster: Cluster) -> None:
    """The job fails with what it says."""
    (cluster.folder / "tensord.toml").write_text("[nonsense]\n")
    job = cluster.run("sbatch", "--parsable", "--output=daemon.log", "tensord.sbatch").strip()
    wait_until(lambda: job not in cluster.jobs(), "the end of the job")
    assert "unknown section [nonsense]" in (cluster.folder / "daemon.log").read_text()
    assert "JobState=FAILED" in cluster.run("scontrol", "show", "job", job)
    assert os.listdir(cluster.folder / "addresses") == []


def test_nobody_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what was tried; a daemon that is gone, or an address that is half gone, is passed over."""
    monkeypatch.syspath_prepend(str(DEPLOY))
    import find_tensord

    with pytest.raises(tensord_client.Unavailable, match=f"no daemon has an address in {tmp_path}"):
        find_tensord.connect(tmp_path, wait=0)
    (tmp_path / "node").write_text("127.0.0.1:1\n/nowhere\n")
    (tmp_path / "half").write_text("127.0.0.1:1\n")
    with pytest.raises(tensord_client.Unavailable, match=r"127\.0\.0\.1:1"):
        find_tensord.connect(tmp_path, wait=0)


def test_the_definition_for_apptainer() -> None:
    """Its extras, files and commands are there. It is built where Apptainer is; nothing here can."""
    text = (DEPLOY / "tensord.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n((?:    .*\n)+)", text, re.MULTILINE))
    assert set(sections) == {"arguments", "files", "post", "test", "runscript"}
    setup = (ROOT / "setup.cfg").read_text()
    for extra in [*re.findall(r"extra=(\w+)", text), "cuda12"]:
        assert f"\n{extra} =\n" in setup
    assert (ROOT / "client" / "pyproject.toml").exists()
    done = subprocess.run(
        ["bash", "-euc", sections["test"]],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensord ")
