"""``python -m tensord`` is the command ``tensord``."""

import os
import sys
from pathlib import Path

from tensord.daemon.cli import main

_ROOT = str(Path(__file__).parents[1])

if __name__ == "__main__":
    # Found in the current folder, as in a checkout: the processes that it starts, which do not look there, run the same code.
    if not sys.flags.safe_path and sys.path[0] == _ROOT:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    main(prog_name="tensord")
