"""Large blocks that come again."""

from __future__ import annotations

import subprocess
import sys


def test_large_blocks_are_kept_not_given_back() -> None:
    """A process of its own: in steady state blocks of 16 MiB cost no page faults."""
    script = (
        "import resource\nimport numpy as np\nfrom tensord.shm import child_process\n"
        "child_process.keep_freed_memory(64 << 20)\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for i in range(40):\n    if i == 20: before = faults()\n    np.ones(4 << 20, np.float32)\n"
        "print(faults() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4096, "fewer than one block's pages for twenty blocks"
