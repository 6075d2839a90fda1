"""Story: an installation is upgraded, and its daemon goes on without the restart that the page asks for.

1. The daemon of version 0.1.0 serves from an installation of its own, whose files are then those of another version. It has
   what its first scrape needs already.
2. The worker and a front are killed. What is started in their place says that it is of another version, and answers nothing; the
   log, the answers to requests, readiness and status say so and to restart the daemon, and the metrics name the cause.
3. The daemon is restarted: it serves, and is of the new version.
"""

from __future__ import annotations

import json
import urllib.request
from importlib.util import cache_from_source
from pathlib import Path

import tensord
from tests import repositories
from tests.daemon_process import tensorctl_status, wait_until
from tests.installation import Installation, made, needs_compiler

pytestmark = needs_compiler

NEWER = "97.0.0"


def upgrade(installation: Installation) -> str:
    """Replaces the version in an installation; returns the one that it had."""
    package = installation.packages / "tensord" / "__init__.py"
    assert package.read_text().count(f'"{tensord.__version__}"') == 1
    package.write_text(package.read_text().replace(tensord.__version__, NEWER))
    return tensord.__version__


def test_no_process_of_another_version_joins(tmp_path: Path) -> None:
    installation = Installation(tmp_path / "venv")
    installation.install(made()[1])
    (tmp_path / "served").mkdir()
    repository = repositories.scale_model(tmp_path / "served" / "models")
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [2.0] * 4}
    # The last module that scrapes import; Python writes its code there when that is done.
    metrics_of = installation.packages / "tensord" / "daemon" / "metrics"
    last, scraped = Path(cache_from_source(str(metrics_of / "page.py"))), metrics_of / "exposition.py"
    last.unlink(missing_ok=True)
    daemon, control = installation.daemon(tmp_path / "served", [repository]), tmp_path / "control.sock"
    daemon.sections["supervisor"]["control_socket"] = str(control)
    daemon.write_config(daemon.sections)
    with daemon:
        daemon.wait_ready()
        wait_until(last.exists, "imports of scrapes", daemon)
        before, former = upgrade(installation), scraped.read_text()
        scraped.write_text('raise ImportError("this is of another version")')
        assert daemon.infer("scale", [tensor])[0] == 200

        (worker,), (front,) = daemon.workers, daemon.fronts
        for name, process in (("worker-0", worker), ("http-0", front)):
            process.kill()
            daemon.wait_log(
                rf"{name} \(process \d+\) is of another version of tensord, installed since this daemon "
                rf"\({before}\) was started: restart the daemon \(systemctl restart tensord\); its replacement starts in "
            )
            another = f"is of another version of tensord, installed since this daemon ({before}) was started"
            told, why = tensorctl_status(control), f"{name} {another}"
            # The last of them is named, and the worker's replacements die as well.
            assert (told["ready"], another in told["outdated"]) == (False, True)
            assert "worker-0 is of another version of tensord" in told["not_served"][0]["reason"]
            if process is worker:
                status, answer = daemon.infer("scale", [tensor])
                assert (status, why in answer["error"]) == (503, True), answer
                status, content = daemon.get("/v2/health/ready")
                assert (status, why in content.decode()) == (400, True), content
        said = f"tensord: this process is of version {NEWER}, its daemon of version {before}"
        assert said in daemon.log.splitlines()
        with urllib.request.urlopen(f"http://{daemon.metrics_url}/metrics") as answer:
            metrics = answer.read().decode().splitlines()
        assert f'tensord_build_info{{version="{before}"}} 1.0' in metrics
        for name in ("worker-0", "http-0"):
            assert [
                line
                for line in metrics
                if line.startswith(f'tensord_process_deaths_total{{cause="version",process="{name}"}}')
            ]

    scraped.write_text(former)
    (tmp_path / "again").mkdir()
    with installation.daemon(tmp_path / "again", [repository]) as daemon:
        daemon.wait_ready()
        assert json.loads(daemon.get("/v2")[1])["version"] == NEWER
        status, answer = daemon.infer("scale", [tensor])
        assert (status, answer["outputs"][0]["data"]) == (200, [7.0] * 4)
