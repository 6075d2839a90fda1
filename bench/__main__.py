"""Measures tensord, row by row, and side by side with a real Triton server where its folder is given.

    python -m bench              our own closed-loop client; absolute figures, answers checked
    python -m bench --peer DIR   DIR/setup.sh installs the peer, DIR/triton.sh runs it, DIR/compare.py measures both
                                 servers in turn with perf_analyzer and prints ours/peer

Both servers run only while this does. Absolute figures on a shared machine mean little; the ratios of one run hold.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import closed_loop, cuda_regions, memory, plot, processor, regions, table
from bench.server import serving

OURS = "127.0.0.1:18100"
OURS_GRPC = "127.0.0.1:18101"
PEER = "127.0.0.1:18000"
#: The rows that are measured side by side; compare.py knows what each one is.
ROWS = "small-http-c1,small-http-c4,small-http-c16,small-http-shm-c16,1MiB-http-c1,16MiB-http-c1,16MiB-http-shm-c1"
ROWS += ",16MiB-http-shm-c4,mlp-http-c32"
ROWS += ",small-grpc-c1,small-grpc-c16,small-grpc-stream-c4,1MiB-grpc-c1,16MiB-grpc-c1,16MiB-grpc-shm-c1,mlp-grpc-c32"
ROWS += ",rnn-http-c16,rnn-stream-c16,rnn-stream-c64,repeat-stream-c4,writer-stream-c1,writer-stream-c16"
#: What stands before the table in docs/.
_PREFACE = """# Side by side with a real Triton

Written by `make bench PEER=DIR`; [measurements.md](measurements.md) says what was measured, on what, and what it means. Medians
of the rounds; `x` is the median of the rounds' ratios ours/peer. Bold: as asked for.

![rates and latencies, relative to Triton](side-by-side.svg)

"""


def main() -> int:
    """Parses the command line and measures the rows."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, help="folder with the peer's setup.sh, triton.sh and compare.py")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement of our own client")
    parser.add_argument("--json", type=Path, help="where compare.py writes every figure")
    parser.add_argument("--plot", type=Path, help="draws the ratios of a run with --peer: FILE.svg or FILE.png")
    parser.add_argument("--docs", type=Path, help="where side-by-side.md and side-by-side.svg of a run with --peer go")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="where the servers' logs go")
    parser.add_argument(
        "--access", choices=("guarded", "snapshot"), default="guarded", help="how tensord uses the clients' regions"
    )
    parser.add_argument("--http-processes", type=int, default=1, help="tensord's HTTP fronts")
    parser.add_argument("--grpc-processes", type=int, default=1, help="tensord's gRPC fronts")
    arguments = parser.parse_args()

    os.environ["TENSORD_REGIONS_ACCESS"] = arguments.access
    tensord = [sys.executable, "-m", "tensord", "serve", "--config", "bench/serve.toml"]
    tensord += [f"--http-processes={arguments.http_processes}", f"--grpc-processes={arguments.grpc_processes}"]
    with contextlib.ExitStack() as stack:
        pid = stack.enter_context(serving(tensord, OURS, arguments.logs / "bench-tensord.log"))
        memory.report(pid)
        regions.check_access(OURS, arguments.access)
        if arguments.peer is None:
            closed_loop.report(OURS, arguments.seconds, arguments.rounds)
            regions.report(OURS, arguments.seconds, arguments.rounds)
            cuda_regions.report(OURS, arguments.seconds)
            return processor.report(pid, OURS, arguments.seconds)
        peer = arguments.peer.resolve()
        subprocess.run([peer / "setup.sh"], check=True, stdout=subprocess.DEVNULL)
        stack.enter_context(
            serving([str(peer / "triton.sh"), str(peer / "models")], PEER, arguments.logs / "bench-peer.log")
        )
        compare = [sys.executable, str(peer / "compare.py"), "--ours-http", OURS, "--ours-grpc", OURS_GRPC]
        compare += ["--peer-http", PEER]
        compare += ["--rows", arguments.rows, "--rounds", str(arguments.rounds)]
        figures = arguments.json or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "figures.json"
        compare += ["--json", str(figures)]
        code = subprocess.run(compare, check=False).returncode if arguments.rows else 0
        if not code and arguments.plot:
            plot.ratios(figures, arguments.plot)
        if not code and arguments.docs:
            (arguments.docs / "side-by-side.md").write_text(_PREFACE + table.markdown(figures))
            plot.ratios(figures, arguments.docs / "side-by-side.svg")
        # perf_analyzer spends longer on JSON than either server; a prepared request does not.
        closed_loop.compare(OURS, PEER, closed_loop.json_row(), arguments.seconds, arguments.rounds)
        return code


if __name__ == "__main__":
    sys.exit(main())
