"""The signals of the daemon's process, while event loops take them over and give them up."""

from __future__ import annotations

import subprocess
import sys

TAKES_OVER = """
import asyncio, signal, threading
from tensord.daemon.processes.signals import Signals

# The kernel gives a thread what another one does not take.
other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
put = signal.signal

def put_and_send(number, action):
    put(number, action)
    signal.pthread_kill(other.ident, number)

async def main():
    stopped, reloaded = asyncio.Event(), asyncio.Event()
    signals.pass_on(asyncio.get_running_loop(), stopped.set, reloaded.set)
    await stopped.wait()
    await reloaded.wait()
    signals.ignore()

signal.signal = put_and_send
signals = Signals()
signals.watch()
asyncio.run(main())
print('stopped')
"""


def test_a_signal_finds_no_default_action_in_between() -> None:
    """Whenever something is to happen with a signal from then on, the signal comes: it stops and reloads, or is passed over."""
    done = subprocess.run([sys.executable, "-c", TAKES_OVER], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")
