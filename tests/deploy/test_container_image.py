"""deploy/container: packages, files, users and entry point. It is built where buildah is; each step is tried on any host."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tensord.config.layers import read
from tests import repositories
from tests.daemon_process import PATIENCE, ROOT
from tests.deploy import containerfile, manifests
from tests.installation import made, needs_compiler

CONSTRAINTS = ROOT / "deploy/container/constraints.txt"
IMAGE = ROOT / "deploy/container/tensord.toml"


def pinned() -> dict[str, str]:
    lines = (line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def required(*extras: str) -> list[Requirement]:
    """Returns what the wheel requires, by setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    texts = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in extras)]
    lines = (line.strip() for text in texts for line in text.splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_each_requirement_is_pinned() -> None:
    """Each to a version that setup.cfg allows; and so is what those require in their turn."""
    versions = pinned()
    for requirement in required("cuda13", "fetch"):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
    for requirement in required():
        for text in metadata.requires(requirement.name) or ():
            further = Requirement(text)
            if further.marker is None or further.marker.evaluate({"extra": ""}):
                assert canonicalize_name(further.name) in versions, f"{requirement.name} requires {further}"


def test_what_is_said_about_the_image_is_so() -> None:
    """Ports are those that its configuration serves on, volumes where it looks, the user no name but a number."""
    options = read(IMAGE).options
    ports = [options.http.port, options.grpc.port, options.metrics.port, options.metrics.agent_port]
    assert containerfile.only("EXPOSE").split() == [str(port) for port in ports]
    sockets, models = containerfile.words("VOLUME")
    assert options.repository.paths == (models,)
    assert str(Path(options.clients.socket).parent) == sockets
    assert containerfile.only("USER") == "10001:10001"
    assert not re.search("tensorctl|python", " ".join(containerfile.health()))  # every ten seconds
    assert re.search(r":[0-9][\w.-]*$", next(each.rest for each in containerfile.instructions() if each.word == "ARG"))
    # As those of the manifests are meant.
    for specification, _ in manifests.daemons([manifests.found(written(), "Deployment")]):
        assert f"{specification['securityContext']['runAsUser']}:10001" == containerfile.only("USER")


def written() -> list[manifests.Document]:
    return [document for path in manifests.files() for document in manifests.written(path)]


@pytest.mark.skipif(shutil.which("apt-cache") is None, reason="this host has no apt")
def test_packages_exist() -> None:
    for name in containerfile.packages():
        done = subprocess.run(["apt-cache", "show", name], capture_output=True, check=False)
        known = subprocess.run(["dpkg", "-s", name], capture_output=True, check=False)
        assert 0 in (done.returncode, known.returncode), f"apt knows no package {name}"


#: In namespaces of its own: the steps over an overlay of /, with the tests' libraries in the place of an index's.
_BUILT = """
set -e
root=$1 libraries=$2 steps=$3 steps_path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs tmpfs "$root" || exit 77
mkdir "$root/upper" "$root/work" "$root/tree"
mount -t overlay overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" "$root/tree" || exit 77
root=$root/tree
rm -rf "$root/etc/tensord" "$root/run/tensord" "$root/opt/tensord"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
export PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
. "$steps"
# The libraries' folders may be root's alone.
for packages in "$root"/opt/tensord/venv/lib/python3*/site-packages; do echo "$libraries" > "$packages/libraries.pth"; done
for folder in $libraries; do
  [ -e "$root$folder" ] || { echo "$folder is on a file system that the tree has not" >&2; exit 77; }
  while [ "$folder" != / ]; do chmod o+rx "$root$folder"; folder=$(dirname "$folder"); done
done
cp -r models/. "$root/var/lib/tensord/models/"
cp client.py "$root/opt/tensord/client.py"
exec "$0" inside.py "$root"
"""
#: As the first process of the container's kind would: starts the entry point, asks as others do, and stops it.
_INSIDE = """
import fcntl, json, os, shutil, signal, socket, struct, subprocess, sys, time, urllib.error, urllib.request

root, said = sys.argv[1], json.load(open("said.json"))
with socket.socket() as sock:  # the loopback interface of this network
    request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)
    fcntl.ioctl(sock, 0x8914, request)

def inside(command, user, groups="--clear-groups", **more):
    became = ["setpriv", "--reuid", user, "--regid", user, groups, "--bounding-set", "-all", "--inh-caps", "-all"]
    words = [shutil.which("chroot"), root, "env", "-C", said["folder"], *(became if user != "0" else ()), *command]
    return subprocess.Popen(words, env=said["environment"], **more)

# A folder of the node, as the kubelet makes it: what the DaemonSet's first container does with it.
os.rmdir(root + "/run/tensord")
os.mkdir(root + "/run/tensord")
assert inside(said["init"], "0").wait() == 0
user = said["user"].partition(":")[0]
daemon = inside([*said["entry"], *said["command"]], user, stderr=open("log.txt", "w"))
def get(path, port=8000):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
until = time.monotonic() + 200
while get("/v2/health/ready") != 200:
    assert daemon.poll() is None and time.monotonic() < until, open("log.txt").read()
    time.sleep(0.1)
told = {"user": os.stat(f"{root}/proc/{daemon.pid}").st_uid}
told["metrics"] = get("/metrics", 8002)
with socket.create_connection(("127.0.0.1", 8003), 10) as agent:
    told["agent"] = agent.makefile().read()
told["health"] = inside(said["health"], user).wait()
told["writable"] = [place for place in ("/etc/tensord", "/opt/tensord") if inside(["test", "-w", place], user).wait() == 0]
told["programs"] = oct(os.stat(root + "/var/cache/tensord").st_mode & 0o777)
# Another pod's user, with the group of the sockets and without it.
client = ["/opt/tensord/venv/bin/python", "/opt/tensord/client.py"]
for name, groups in (("client", "--groups=" + user), ("stranger", "--clear-groups")):
    asked = inside(client, "20000", groups, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    told[name] = asked.communicate()[0].strip().splitlines()[-1:]
drained = inside(["tensorctl", "drain", "--wait"], user)
time.sleep(1)
told["drained"] = [get("/v2/health/live"), get("/v2/health/ready"), drained.wait(), inside(said["health"], user).wait()]
daemon.send_signal(signal.SIGTERM)
told["status"] = daemon.wait(200)
print(json.dumps(told))
"""
_CLIENT = """
import numpy as np
import tensord_client
try:
    with tensord_client.connect("/run/tensord") as client:
        print(client.model("scale", timeout=60)({"x": np.array([[1, 2, 3, 4]], np.float32)})["y"].tolist(), client)
except (tensord_client.ServingError, OSError) as error:
    print(f"{type(error).__name__}: {error}")
"""


def system_python() -> str:
    """Returns the version of the Python that the image's steps find on this host; "": there is none that they can use."""
    check = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    done = subprocess.run(["env", f"PATH={path}", "python3", "-c", check], capture_output=True, text=True, check=False)
    return done.stdout.strip()


@pytest.mark.release("the image's steps over a copy of this host")
@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may lay a tree over this host's")
@pytest.mark.skipif(
    system_python() != f"{sys.version_info.major}.{sys.version_info.minor}",
    reason="the system's python3 is another than that of these tests",
)
def test_steps_and_entry_point(tmp_path: Path) -> None:
    """
    1. Each step, over a copy of this host. 2. The entry point with its configuration, as its user, in namespaces of its own.
    3. Its health, as the image asks for it; a client of another user by the folder of sockets. 4. Drain, and stop.
    Result: all succeed, nobody is root, and who has not the sockets' group does not come in.
    """
    (init,) = (
        container["command"]
        for container in manifests.pod(manifests.found(written(), "DaemonSet"))["initContainers"]  # type: ignore[index]
    )
    said = {
        "environment": containerfile.environment() | {"JAX_PLATFORMS": "cpu"},
        "folder": containerfile.only("WORKDIR"),
        "init": init,
        "user": containerfile.only("USER"),
        "entry": containerfile.words("ENTRYPOINT"),
        "command": containerfile.words("CMD"),
        "health": containerfile.health(),
    }
    (tmp_path / "said.json").write_text(json.dumps(said))
    (tmp_path / "inside.py").write_text(_INSIDE)
    (tmp_path / "client.py").write_text(_CLIENT)
    (tmp_path / "steps.sh").write_text(containerfile.steps({"dist/tensord-*.whl": str(made()[1])}))
    repositories.scale_model(tmp_path / "models")
    root = tmp_path / "root"
    root.mkdir()
    namespaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child"]
    # Of the client as well: it is another image's.
    libraries = [path for path in sys.path if Path(path).name == "site-packages"] + [str(ROOT / "client")]
    done = subprocess.run(
        [
            *namespaces,
            "bash",
            "-c",
            _BUILT,
            sys.executable,
            str(root),
            "\n".join(libraries),
            str(tmp_path / "steps.sh"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"this host allows no such tree in namespaces of our own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["user"], told["metrics"], told["health"], told["status"]) == (10001, 200, 0, 0)
    assert told["agent"].startswith("up ready ")
    assert (told["writable"], told["programs"]) == ([], "0o700")
    assert re.fullmatch(r"\[\[4\.0, 7\.0, 10\.0, 13\.0\]\] <.*[Ll]ane.*>", *told["client"])
    assert re.fullmatch(
        r"Unavailable: .*Permission denied; /run/tensord is for members of group '\w+': .*", *told["stranger"]
    )
    assert told["drained"] == [200, 400, 0, 1]


_BASE_FILES = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
_BUILDERS = ("buildah", "debootstrap")
#: In a network of its own, beside no other process: starts the container, waits for its health, asks it, and stops it.
_RUN = """
import fcntl, json, os, signal, socket, struct, subprocess, sys, time

run, said = json.loads(sys.argv[1]), json.loads(sys.argv[2])
with socket.socket() as sock:  # the loopback interface of this network
    fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))
daemon = subprocess.Popen([*run, *said["entry"], *said["command"]])
until = time.monotonic() + 200
while subprocess.run([*run, *said["health"]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
    assert daemon.poll() is None and time.monotonic() < until
    time.sleep(1)
ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/v2').read().decode())"
print(subprocess.run([*run, "python", "-c", ask], capture_output=True, text=True, check=True).stdout)
# Not buildah's process, which has the same words behind its name.
words = "^[^ ]*python3 [^ ]*tensord " + " ".join(said["command"])
pid = subprocess.run(["pgrep", "-U", said["user"], "-f", words], capture_output=True, text=True, check=True).stdout
os.kill(int(pid), signal.SIGTERM)
print(daemon.wait(200))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a base of Debian's packages")
@pytest.mark.skipif(
    not all(map(shutil.which, _BUILDERS)), reason=f"no builder of images: {' and '.join(_BUILDERS)} are not installed"
)
def test_a_builder_builds_and_runs_it(tmp_path: Path) -> None:
    """
    1. Debian's packages make a base, since a registry of images may be out of reach. 2. The file is built on it as its head says,
    with packages of apt and pip. 3. The image's entry point runs as its user.
    Result: what the file says is in the image; it is healthy by its own command, answers, and stops in good order.
    """
    base = tmp_path / "base"
    made_base = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(base)]
    subprocess.run(made_base, check=True, stdout=subprocess.DEVNULL, timeout=4 * PATIENCE)
    # How this host reaches its index.
    for path in filter(os.path.exists, _BASE_FILES):
        shutil.copy(path, f"{base}{path}")
    context = tmp_path / "context"
    shutil.copytree(ROOT / "deploy", context / "deploy")
    (context / "dist").mkdir()
    shutil.copy(made()[1], context / "dist")
    buildah = [
        "buildah",
        "--storage-driver",
        "vfs",
        "--root",
        str(tmp_path / "root"),
        "--runroot",
        str(tmp_path / "run"),
    ]

    def done(*words: str) -> str:
        ended = subprocess.run(
            [*buildah, *words], cwd=context, capture_output=True, text=True, timeout=4 * PATIENCE, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout.strip()

    try:
        started = done("from", "scratch")
        done("add", "--quiet", started, str(base), "/")
        done("commit", "--quiet", started, "localhost/base")
        done("rm", started)
        shutil.rmtree(base)
        head = ("--format", "docker", "-f", "deploy/container/Containerfile", "--build-arg", "BASE=localhost/base")
        done("build", "--isolation", "chroot", *head, "-t", "tensord", ".")
        config = json.loads(done("inspect", "--type", "image", "tensord"))["Docker"]["config"]
        assert config["User"] == containerfile.only("USER")
        assert config["Entrypoint"] == containerfile.words("ENTRYPOINT")
        assert config["Cmd"] == containerfile.words("CMD")
        assert sorted(config["Volumes"]) == sorted(containerfile.words("VOLUME"))
        assert sorted(config["ExposedPorts"]) == [f"{port}/tcp" for port in containerfile.only("EXPOSE").split()]
        assert config["Healthcheck"]["Test"] == ["CMD", *containerfile.health()]
        container = done("from", "tensord")
        run = [*buildah, "run", "--isolation", "chroot", container, "--"]
        said = {
            "entry": config["Entrypoint"],
            "command": config["Cmd"],
            "health": containerfile.health(),
            "user": config["User"].partition(":")[0],
        }
        namespaces = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        ran = subprocess.run(
            [*namespaces, sys.executable, "-c", _RUN, json.dumps(run), json.dumps(said)],
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        answer, status = ran.stdout.split("\n\n")
        assert json.loads(answer)["name"] == "tensord"
        assert status.strip() == "0"
    finally:
        subprocess.run([*buildah, "rm", "--all"], capture_output=True, check=False)
        shutil.rmtree(tmp_path / "root", ignore_errors=True)
