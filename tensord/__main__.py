"""Makes ``python -m tensord`` the same as the command ``tensord``."""

import os
import sys
from pathlib import Path

from tensord.daemon.processes.signals import Signals

_ROOT = str(Path(__file__).parents[1])


def run() -> None:
    """Runs the command ``tensord``."""
    signals = Signals()
    if "serve" in sys.argv[1:2]:
        signals.watch()
    from tensord.daemon.cli import main

    main(prog_name="tensord", obj=signals if "serve" in sys.argv[1:2] else None)


if __name__ == "__main__":
    # In a checkout the package is found in the current folder: child processes, which do not look there, must run the same code.
    if not sys.flags.safe_path and sys.path[0] == _ROOT:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    run()
