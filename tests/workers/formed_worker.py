"""A worker whose form on the device is chosen, so that a CPU computes in the form of a GPU."""

from __future__ import annotations

from tests.workers.host_virtual_memory import HostVirtualMemory
from workers.device.virtual_memory import VirtualMemory
from workers.process.build import Worker
from workers.process.config import WorkerConfig


class FormedConfig(WorkerConfig, frozen=True, kw_only=True):
    """None: as the device has it."""

    runs_ahead: bool | None = None
    uses_graphs: bool | None = None
    keeps_weights: bool = False


class FormedWorker(Worker):
    """Of any configuration; one that is no `FormedConfig` changes nothing."""

    @property
    def runs_ahead(self) -> bool:
        chosen = getattr(self.config, "runs_ahead", None)
        return super().runs_ahead if chosen is None else chosen

    @property
    def uses_graphs(self) -> bool:
        chosen = getattr(self.config, "uses_graphs", None)
        return super().uses_graphs if chosen is None else chosen

    def _virtual_memory(self) -> VirtualMemory | None:
        if getattr(self.config, "keeps_weights", False):
            return HostVirtualMemory()
        return super()._virtual_memory()
