"""The part of a worker that serves requests. It also runs in processes that are no workers (``workers/local_worker.py``)."""

from __future__ import annotations

import time

from tensord.config.options import Options
from tensord.shm.sequence_page import SequencePage
from tensord.shm.status_page import StatusPage
from tensord.workers.dispatch.dispatcher import Dispatcher
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.sequence_register import SequenceRegister
from tensord.workers.programs.run_errors import CheckDevice, works
from tensord.workers.regions.region_table import RegionTable
from tensord.workers.threads.inbox import Inbox
from tensord.workers.threads.work_thread import WorkThread


class Engine:
    """The models, sequences and dispatcher of one worker. Only the thread of the worker's loop may use them."""

    def __init__(
        self, options: Options, inbox: Inbox, regions: RegionTable, gpu: int | None, check: CheckDevice = works
    ) -> None:
        """Makes the worker's models, sequences and dispatcher.

        ``inbox``: a queue of functions that the worker's event loop calls. ``regions``: the worker's table of regions.
        ``gpu``: the GPU's number, or None on a processor. ``check``: raises DeviceLost if the device has failed.
        """
        most = options.requests.max_sequences
        self._buckets = options.metrics.buckets
        self.page = StatusPage.create()
        self.sequences = SequenceRegister(SequencePage.create(most), most)
        self.models = ModelTable()
        self.compiler = WorkThread("compiler", inbox)
        self.dispatcher = Dispatcher(
            options, self.models, regions, self.page, self.compiler, time.monotonic_ns, check, gpu, inbox.post
        )

    def adopt(self, loaded: LoadedModel) -> ModelVersion:
        """Makes a ``ModelVersion`` of a loaded model. Its instances are in the worker's rate limiter until it is closed."""
        version = ModelVersion(loaded, self.sequences, self._buckets)
        self.dispatcher.limiter.add([instance for instance in loaded.instances if not instance.closing])
        version.when_closed(lambda: self.dispatcher.limiter.remove(version.ended_instances))
        return version

    def close(self) -> None:
        self.page.close()
        self.sequences.page.close()

    def __repr__(self) -> str:
        return f"<Engine {self.models!r}>"
