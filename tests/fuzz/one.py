"""Fuzzes one target in this process, by libFuzzer: ``python -m tests.fuzz.one TARGET [libFuzzer's arguments]``.

``python -m tests.fuzz`` starts it, with the environment that it needs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any


def main(name: str, arguments: list[str]) -> None:
    """Fuzzes until libFuzzer ends the process: with status 0 if it found nothing."""
    import atheris

    with atheris.instrument_imports(include=["tensord", "tensord_client"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS
    target: Any = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="tensord-fuzz-") as seeds:
        for number, content in enumerate(target.corpus(name)):
            Path(seeds, str(number)).write_bytes(content)
        atheris.Setup([f"{name}", *arguments, seeds], target.run)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
