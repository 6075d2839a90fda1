"""What a loop serves with, in a worker's process or in somebody else's: models, their sequences, and the dispatcher over them."""

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
    """Made and used by the loop's thread, which asks its parts."""

    def __init__(
        self, options: Options, inbox: Inbox, regions: RegionTable, gpu: int | None, check: CheckDevice = works
    ) -> None:
        """
        Args:
          inbox: the loop's.
          gpu: the device's number, None of the processor.
          check: of the device.
        """
        most = options.requests.max_sequences
        self.page = StatusPage.create()
        self.sequences = SequenceRegister(SequencePage.create(most), most)
        self.models = ModelTable()
        self.compiler = WorkThread("compiler", inbox)
        self.dispatcher = Dispatcher(
            options, self.models, regions, self.page, self.compiler, time.monotonic_ns, check, gpu, inbox.post
        )

    def adopt(self, loaded: LoadedModel) -> ModelVersion:
        """The version that requests are for from now on; its instances wait for resources while it lives."""
        version = ModelVersion(loaded, self.sequences)
        self.dispatcher.limiter.add(loaded.instances)
        version.when_closed(lambda: self.dispatcher.limiter.remove(version.own_instances))
        return version

    def close(self) -> None:
        """Lets go of both pages."""
        self.page.close()
        self.sequences.page.close()

    def __repr__(self) -> str:
        return f"<Engine {self.models!r}>"
