"""Validates uploads in sandboxed processes: at most MAX_VALIDATIONS at a time, and only one at a
time for each tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import assert_never
from weakref import WeakValueDictionary

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.module_list import write_module_list
from adapters.format.validator import Validated
from adapters.manifest import AdapterManifest, BaseModelShape
from admin.uploads.sandbox import DiskFailed, Outcome, Refused, Rejected, Upload
from sandbox.sandboxes import Sandboxes
from sandbox.task import Bounds, Died
from store.errors import Invalid
from web.errors import TooLarge

MAX_VALIDATIONS = 2
BOUNDS = Bounds(memory_bytes=64 << 20, cpu_s=60.0, wall_s=120.0)
"""Limits of the process that validates one adapter."""
HINTS = {
    "memory": "Validating it takes more memory than any adapter that can be served.",
    "timeout": "Validating it takes longer than any adapter that can be served.",
    "crashed": "Validating it ended without a result.",
}

NONE: Mapping[str, str] = MappingProxyType({})
_decoder = msgspec.json.Decoder(Outcome)


class Validation:
    """Validator of uploads, which unpacks and validates each of them in a sandboxed process."""

    def __init__(
        self,
        max_rank: int,
        max_bytes: int,
        max_image_bytes: int = 1 << 30,
        *,
        bounds: Bounds = BOUNDS,
    ) -> None:
        """`max_bytes` is the maximum size of an adapter's files together. `max_image_bytes` is the
        maximum size of its packed image in bfloat16."""
        self._max_rank = max_rank
        self._max_bytes = max_bytes
        self._max_image_bytes = max_image_bytes
        self._bounds = bounds
        self._sandboxes = Sandboxes("admin.uploads.sandbox")
        self._threads = ThreadPoolExecutor(MAX_VALIDATIONS, "validations")
        self._slots = asyncio.Semaphore(MAX_VALIDATIONS)
        self._tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def validate(
        self,
        tenant_id: str,
        folder: Path,
        bases: list[BaseModelShape],
        archive: Path | None = None,
        min_free_bytes: int = 0,
        chat_templates: Mapping[str, str] = NONE,
    ) -> AdapterManifest:
        """Validates the files in `folder`, and writes the list of modules there. If `archive` is
        given, unpacks it into `folder` first, but leaves `min_free_bytes` of the disk free. First
        parses the `chat_templates`, which are texts by the name of the field that has them.

        Raises AdapterRejected, with the code adapter.validation.memory or
        adapter.validation.timeout if the process reached a limit, and adapter.validation.crashed if
        the process crashed. Raises Invalid for a chat template that is not valid, Invalid or
        TooLarge for an archive that cannot be read, and OSError for failures of the disk.
        """
        upload = Upload(
            folder=str(folder),
            archive=None if archive is None else str(archive),
            bases=bases,
            max_rank=self._max_rank,
            max_bytes=self._max_bytes,
            max_image_bytes=self._max_image_bytes,
            min_free_bytes=min_free_bytes,
            chat_templates=dict(chat_templates),
        )
        turn = self._tenants.setdefault(tenant_id, asyncio.Lock())
        async with turn, self._slots:
            validated = _result(await self._run(upload))
        await asyncio.to_thread(write_module_list, folder, validated.modules)
        return validated.manifest

    async def close(self) -> None:
        await asyncio.to_thread(self._sandboxes.close)
        self._threads.shutdown(wait=False)

    async def _run(self, upload: Upload) -> Outcome | Died:
        file_bytes = upload.max_bytes if upload.archive else 0
        bounds = msgspec.structs.replace(self._bounds, file_bytes=file_bytes)
        task = self._sandboxes.task(msgspec.json.encode(upload), bounds)
        running = asyncio.get_running_loop().run_in_executor(self._threads, task.run)
        try:
            outcome = await asyncio.shield(running)
        except asyncio.CancelledError:
            task.stop()
            raise
        return outcome if isinstance(outcome, Died) else _decoder.decode(outcome)


def _result(outcome: Outcome | Died) -> Validated:
    match outcome:
        case Validated():
            return outcome
        case Rejected():
            raise AdapterRejected(**outcome.error)
        case Refused():
            kind = TooLarge if outcome.is_too_large else Invalid
            raise kind(outcome.message, outcome.code, outcome.param)
        case DiskFailed():
            raise OSError(outcome.errno, outcome.message)
        case Died():
            code = f"adapter.validation.{outcome.why}"
            raise AdapterRejected(code, "adapter", hint=HINTS[outcome.why])
        case _:
            assert_never(outcome)
