"""``tensord fetch`` as a command, from real servers on loopback, beside a daemon that polls the repository."""

from __future__ import annotations

import io
import os
import re
import signal
import ssl
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from tests.daemon.fetching.hubs import Files, GoogleStorage, Hub, HuggingFace
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, has_ended, wait_until
from tests.repositories import ensemble, scale_model

BLOCK = 8 << 20


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tensord", "fetch", *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "PYTHONPATH") if name in os.environ}
    return {**kept, "TENSORD_WORKERS_DEVICE": "cpu", "AWS_EC2_METADATA_DISABLED": "true", **variables}


def fetch(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


class Server(ThreadingHTTPServer):
    """Serves one file over HTTPS with parts. What lies behind the first block comes when ``gate`` is set."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.begins: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def handle_error(self, *_: object) -> None:
        """Ignores errors of clients that are killed."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    server: Server

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        content = self.server.content
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(found[1]), int(found[2]) + 1) if found else (0, len(content))
        if self.command == "GET":
            self.server.begins.append(begin)
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", f'"{hash(content)}"')
        if found:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[begin : begin + BLOCK])
            self.server.gate.wait(PATIENCE)
            self.wfile.write(content[begin + BLOCK : end])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Runs a server with a certificate of its own, whose authority is written to ``ca.pem``."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    started = Server(b"")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    started.socket = context.wrap_socket(started.socket, server_side=True)
    threading.Thread(target=started.serve_forever, daemon=True).start()
    yield started
    started.gate.set()
    started.shutdown()
    started.server_close()


def archived(folder: Path, ballast: int = 0) -> bytes:
    """Returns a tar file of a model, with a further file of ``ballast`` random bytes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.add(folder, folder.name)
        member = tarfile.TarInfo(f"{folder.name}/ballast")
        member.size = ballast
        tar.addfile(member, io.BytesIO(os.urandom(ballast)))
    return file.getvalue()


def test_a_polling_daemon_sees_one_model_and_then_the_other(server: Server, tmp_path: Path) -> None:
    """A fetch is killed half way:

    1. the daemon goes on with what it serves, and sees nothing of the half;
    2. the next fetch brings the archive whole, in one request;
    3. the daemon loads what it brought; a further fetch has nothing to do.
    """
    models = scale_model(tmp_path / "models", "m", factor=3.0)
    server.content = archived(scale_model(tmp_path / "elsewhere", "m", factor=5.0, version=2) / "m", 3 * BLOCK)
    server.gate.clear()
    url, trusted = f"https://127.0.0.1:{server.server_port}/m.tar", {"SSL_CERT_FILE": str(tmp_path / "ca.pem")}
    options = {"repository": {"paths": [str(models)], "control_mode": "poll", "poll_interval": 0.1}}
    asked = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]
    with DaemonProcess(tmp_path, [models], options) as daemon:
        halved = subprocess.Popen(
            command(url, models / "m"), cwd=ROOT, env=environment(**trusted), start_new_session=True, text=True
        )
        stage = models / ".m.fetch"
        came = lambda: sum(part.stat().st_size for part in stage.glob("part.*/*"))  # noqa: E731
        wait_until(lambda: has_ended(halved) or came() >= BLOCK, "a block in the stage")
        halved.send_signal(signal.SIGKILL)
        assert halved.wait() == -signal.SIGKILL
        time.sleep(0.5)  # some looks of the daemon
        assert daemon.infer("m", asked)[1]["outputs"][0]["data"] == [4, 4, 4, 4]
        assert sorted(os.listdir(models)) == [".m.fetch", "m"]
        before = daemon.log
        server.gate.set()
        server.begins.clear()
        done = fetch(url, models / "m", **trusted)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"m: version 2 is in {models / 'm'}, 24 MiB from {url}")
        assert server.begins == [0]
        wait_until(lambda: daemon.infer("m", asked)[1].get("model_version") == "2", "version 2", daemon)
        assert daemon.infer("m", asked)[1]["outputs"][0]["data"] == [6, 6, 6, 6]
        assert "m" not in re.findall(r"model '(\w+)'", daemon.log[: len(before)].partition("ready:")[2])
        assert "in no repository any more" not in daemon.log
        server.begins.clear()
        done = fetch(url, models / "m", **trusted)
        assert (done.returncode, done.stdout) == (0, f"m: it is as at {url} already\n")
        assert server.begins == []
        assert os.listdir(models) == ["m"]


def test_a_certificate_that_nobody_vouches_for(server: Server, tmp_path: Path) -> None:
    done = fetch(f"https://127.0.0.1:{server.server_port}/m.tar?key=secret", tmp_path / "models" / "m")
    assert done.returncode == 1
    assert "certificate verify failed" in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "models").exists()


def test_a_model_that_does_not_load_stays_outside(tmp_path: Path) -> None:
    """The served models stay; where no code may be run, only folders and configuration are checked."""
    good = scale_model(tmp_path / "models", "m") / "m" / "1" / "model.py"
    bad = scale_model(tmp_path / "elsewhere", "m") / "m"
    code = (bad / "1" / "model.py").read_text()
    (bad / "1" / "model.py").write_text(
        code.replace("    def apply", "    raise ValueError('a bad day')\n    def apply")
    )
    before = good.read_text()
    done = fetch(bad, tmp_path / "models" / "m")
    assert done.returncode == 1
    stage = tmp_path / "models" / ".m.fetch" / "m"
    assert re.match(rf"tensord: model 'm' as it was fetched cannot be served, and stays in {stage}: ", done.stderr)
    assert "a bad day" in done.stderr
    assert good.read_text() == before
    assert fetch("--read-only", bad, tmp_path / "models" / "m").returncode == 0
    (bad / "config.pbtxt").write_text("nonsense: 1")
    done = fetch("--read-only", bad, tmp_path / "models" / "m")
    assert (done.returncode, "config.pbtxt of model 'm': line 1" in done.stderr) == (1, True)


def test_an_ensemble_is_checked_beside_its_members(tmp_path: Path) -> None:
    ensemble(tmp_path / "elsewhere", "both", ["x FP32 4"], ["y FP32 4"], [("scale", {"x": "x"}, {"y": "y"})], 8)
    done = fetch(tmp_path / "elsewhere" / "both", tmp_path / "models" / "both")
    assert (done.returncode, "models that are not available or ambiguous: scale" in done.stderr) == (1, True)
    scale_model(tmp_path / "models")
    assert fetch(tmp_path / "elsewhere" / "both", tmp_path / "models" / "both").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["/nowhere/m", "models/m"], 1, "/nowhere/m: there is no such folder, or no file of a model is in it"),
        (["--sha256", "12", "/nowhere/m", "models/m"], 2, "'12' has not 64 hexadecimal digits"),
        (["systemd", "/proc/models/m"], 1, "'/proc/models'"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], status: int, words: str) -> None:
    done = fetch(*arguments)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_s3(tmp_path: Path) -> None:
    """A folder of a bucket, of a server that speaks S3."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'tensord[test-fetch]'")
    pytest.importorskip("moto.server", reason="moto's server is not installed: pip install 'tensord[test-fetch]'")
    model = scale_model(tmp_path / "elsewhere", "m") / "m"
    program = """
import sys, time, boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
host, port = server.get_host_and_port()
s3 = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
s3.create_bucket(Bucket="bucket")
s3.put_object(Bucket="bucket", Key="models/m/")
s3.put_object(Bucket="bucket", Key="models/m/1/model.py", Body=open(sys.argv[1], "rb").read())
s3.put_object(Bucket="bucket", Key="models/mm/1/model.py", Body=b"another")
print(port, flush=True)
sys.stdin.read()
"""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    with subprocess.Popen(
        [sys.executable, "-c", program, model / "1" / "model.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**keys),
    ) as moto:
        assert moto.stdout is not None
        keys["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{int(moto.stdout.readline())}"
        done = fetch("s3://bucket/models/m", tmp_path / "models" / "m", **keys)
        again = fetch("s3://bucket/models/m", tmp_path / "models" / "m", **keys)
        absent = fetch("s3://bucket/models/absent", tmp_path / "models" / "absent", **keys)
        moto.communicate("")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "models" / "m" / "1" / "model.py").read_text() == (model / "1" / "model.py").read_text()
    assert sorted(os.listdir(tmp_path / "models" / "m")) == [".fetched.json", "1"]
    assert again.stdout == "m: it is as at s3://bucket/models/m already\n"
    assert (absent.returncode, "there is no such folder" in absent.stderr) == (1, True)


@pytest.mark.parametrize(
    ("protocol", "root", "handler"), [("hf", "me/models", HuggingFace), ("gs", "bucket", GoogleStorage)]
)
def test_from_a_hub(tmp_path: Path, protocol: str, root: str, handler: type[Files]) -> None:
    """
    1. A model with a large file, which lies among others, comes by its provider's client library. 2. It comes again.
    3. A model that is not there; a repository or bucket that is not there. Result: 1 is complete, each file was asked for once;
    2 asks for no file; 3 fail at once and leave nothing.
    """
    if protocol == "gs":
        pytest.importorskip("gcsfs", reason="gcsfs is not installed: pip install 'tensord[test-fetch]'")
    else:
        pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install 'tensord[fetch]'")
    code = (scale_model(tmp_path / "elsewhere", "m") / "m" / "1" / "model.py").read_bytes()
    weights = os.urandom(256) * ((2 * BLOCK + 512) // 256)
    model = {"1/model.py": code, "1/weights.bin": weights}
    files = {f"models/m/{name}": content for name, content in model.items()} | {"models/mm/1/model.py": b"another"}
    folder = tmp_path / "models" / "m"
    with Hub(handler, files) as hub:
        # Google's library asks it where accounts are looked for elsewhere.
        variables = {"HF_ENDPOINT": hub.url, "STORAGE_EMULATOR_HOST": hub.url, "HF_HOME": str(tmp_path / "hf")}
        done = fetch(f"{protocol}://{root}/models/m", folder, **variables)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"m: version 1 is in {folder}, 16 MiB from {protocol}://{root}/models/m\n"
        assert {name: (folder / name).read_bytes() == content for name, content in model.items()} == dict.fromkeys(
            model, True
        )
        assert sorted(os.listdir(folder)) == [".fetched.json", "1"]
        assert len([asked for asked in hub.asked if "GET" in asked and "weights.bin" in asked]) == 1
        before = len(hub.asked)
        again = fetch(f"{protocol}://{root}/models/m", folder, **variables)
        assert again.stdout == f"m: it is as at {protocol}://{root}/models/m already\n"
        assert not [asked for asked in hub.asked[before:] if "GET" in asked and "weights.bin" in asked]
        absent = fetch(f"{protocol}://{root}/models/absent", tmp_path / "models" / "absent", **variables)
        assert (absent.returncode, "there is no such folder" in absent.stderr) == (1, True)
        strange = fetch(f"{protocol}://nobodys/models/m", tmp_path / "models" / "absent", **variables)
        assert strange.returncode == 1
        assert re.search("it is not there|Repository Not Found", strange.stderr), strange.stderr
    assert os.listdir(tmp_path / "models") == ["m"]
