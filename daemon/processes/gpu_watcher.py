"""Runs the process that watches the GPUs, keeps the state that it reported last, and logs errors of GPUs.

    run ─▶ the process starts ─▶ reports states every 2 s ─▶ ``gpus``      it ends ─▶ logged once ─▶ started again after 60 s
                              └─ reports an error of a GPU ─▶ log, ``errors``

The daemon never waits for the process, which may hang in the GPU driver. ``gpus`` is empty if no report came in the last 10 s.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from tensord.daemon.processes.gpu_watch import Event, GpuState, Look
from tensord.daemon.processes.spawned import child_environment

_log = logging.getLogger(__name__)
_MODULE = "tensord.daemon.processes.gpu_watch"
#: Seconds between reports, until a report is outdated, and until a watching process that ended is started again.
_INTERVAL = 2.0
_STALE = 10.0
_PAUSE = 60.0
_KINDS = {
    "xid": "reports XID {} (https://docs.nvidia.com/deploy/xid-errors)",
    "ecc": "has met a memory error of two bits, which was not corrected",
}


class GpuWatcher:
    """Starts the process that watches the GPUs, and reads its reports. Used on the event loop only."""

    def __init__(self) -> None:
        #: UUID and kind of event -> how often it was reported.
        self.errors: Counter[tuple[str, str]] = Counter()
        self._gpus: Sequence[GpuState] = ()
        self._said_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._logged = ""

    @property
    def gpus(self) -> Sequence[GpuState]:
        """Returns the state of each GPU of this host as it was last reported, or () if no report came in the last 10 s."""
        return self._gpus if time.monotonic() - self._said_at < _STALE else ()

    async def run(self, environment: Mapping[str, str]) -> None:
        """Runs the process that watches the GPUs. If the process ends, starts it again after 60 s.

        ``environment``: the environment variables of the process.
        """
        try:
            while True:
                reason = await self._watch(environment)
                if reason != self._logged:
                    self._logged = reason
                    _log.warning("GPUs are not watched, and metrics show none: %s", reason)
                await asyncio.sleep(_PAUSE)
        finally:
            if self._process is not None:
                self._process.kill()

    async def _watch(self, environment: Mapping[str, str]) -> str:
        """Runs the process that watches the GPUs, and returns why it ended."""
        loop = asyncio.get_running_loop()
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(_INTERVAL)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(environment),
            )
        except OSError as error:
            return f"no process could be started: {error.strerror}"
        lines, words = asyncio.StreamReader(), asyncio.StreamReader()
        for reader, pipe in ((lines, process.stdout), (words, process.stderr)):
            await loop.connect_read_pipe(lambda reader=reader: asyncio.StreamReaderProtocol(reader), pipe)  # type: ignore[misc]
        try:
            while line := await lines.readline():
                self._report(msgspec.json.decode(line, type=Look | Event))
            said = (await words.read()).decode(errors="replace").strip()
            return said.rpartition("\n")[2] or "who watches them ended without a word"
        except (msgspec.MsgspecError, ValueError) as error:
            return f"what is said of them is not understood: {error}"
        finally:
            process.kill()
            process.poll()

    def _report(self, what: Look | Event) -> None:
        if isinstance(what, Look):
            self._gpus, self._said_at = what.gpus, time.monotonic()
            for uuid in ("", *(gpu.uuid for gpu in what.gpus)):
                for kind in _KINDS:
                    # A rate needs a series that is there before the first error.
                    self.errors.setdefault((uuid, kind), 0)
            self._logged = ""
            return
        self.errors[what.uuid, what.kind] += 1
        _log.error("GPU %s %s", what.uuid or "(unknown)", _KINDS.get(what.kind, what.kind).format(what.number))

    def __repr__(self) -> str:
        return f"<GpuWatcher {len(self.gpus)} GPUs>"
