"""Measures tensord side by side with a real Triton server, row by row.

    python -m bench --peer DIR   DIR/setup.sh installs the peer, DIR/triton.sh runs it, DIR/compare.py measures both
                                 servers in turn with perf_analyzer and prints ours/peer

Both servers run only while this does. Absolute figures on a shared machine mean little; the ratios of one run hold.
``python -m bench.vary`` measures this checkout alone, with a client of our own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import figures, regions
from bench.server import ROOT
from bench.vary import servers

#: The rows that are measured side by side; compare.py knows what each one is.
ROWS = "small-http-c1,small-http-c4,small-http-c16,small-http-shm-c16,1MiB-http-c1,16MiB-http-c1,16MiB-http-shm-c1"
ROWS += ",16MiB-http-shm-c4,mlp-http-c32"
ROWS += ",small-grpc-c1,small-grpc-c16,small-grpc-stream-c4,1MiB-grpc-c1,16MiB-grpc-c1,16MiB-grpc-shm-c1,mlp-grpc-c32"
ROWS += ",rnn-http-c16,rnn-stream-c16,rnn-stream-c64,repeat-stream-c4,writer-stream-c1,writer-stream-c16"
#: What stands before the table in docs/.
_PREFACE = """# Side by side with a real Triton

Written by `make bench PEER=DIR`; [measurements.md](measurements.md) says what was measured, on what, and what it means.
Medians of the rounds; `x` is the median of the rounds' ratios ours/peer. Bold: as asked for.

![rates and latencies, relative to Triton](side-by-side.svg)

"""


def main() -> int:
    """Parses the command line and measures the rows."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", type=Path, required=True, help="folder with the peer's setup.sh, triton.sh and compare.py"
    )
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where compare.py writes every figure")
    parser.add_argument("--docs", type=Path, help="where side-by-side.md and side-by-side.svg go")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the servers' logs go")
    parser.add_argument(
        "--access", choices=("guarded", "snapshot"), default="guarded", help="how tensord uses the clients' regions"
    )
    arguments = parser.parse_args()

    os.environ["TENSORD_REGIONS_ACCESS"] = arguments.access
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(servers.ours(servers.OURS, ROOT, arguments.logs))
        regions.check_access(ours.http, arguments.access)
        peer = stack.enter_context(servers.peer(str(arguments.peer), arguments.logs))
        compare = [
            sys.executable,
            str(arguments.peer / "compare.py"),
            "--ours-http",
            ours.http,
            "--ours-grpc",
            ours.grpc,
        ]
        compare += ["--peer-http", peer.http, "--rows", arguments.rows, "--rounds", str(arguments.rounds)]
        written = arguments.json or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "figures.json"
        code = subprocess.run([*compare, "--json", str(written)], check=False).returncode
        if not code and arguments.docs:
            (arguments.docs / "side-by-side.md").write_text(_PREFACE + figures.markdown(written))
            figures.ratios(written, arguments.docs / "side-by-side.svg")
        return code


if __name__ == "__main__":
    sys.exit(main())
