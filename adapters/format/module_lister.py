"""Program that lists the modules of a stored adapter in a sandbox:

python -m adapters.format.module_lister
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.module_list import ListedModule
from adapters.format.patterns import CPU_S
from adapters.format.validator import AdapterFiles, list_modules
from adapters.manifest import BaseModelShape
from sandbox.server import serve


class Work(msgspec.Struct, frozen=True):
    folder: str
    base: BaseModelShape


class Listed(msgspec.Struct, frozen=True, tag=True):
    modules: list[ListedModule]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Fields of the AdapterRejected that ended the listing."""

    code: str
    field: str
    got: Any
    allowed: Any
    hint: str


def main() -> None:
    serve(lambda work: msgspec.json.encode(_list(msgspec.json.decode(work, type=Work))))


def _list(work: Work) -> Listed | Refused:
    try:
        files = AdapterFiles.in_folder(Path(work.folder))
        return Listed(list(list_modules(files, work.base, CPU_S)))
    except AdapterRejected as rejected:
        return Refused(**rejected.to_dict())


if __name__ == "__main__":
    main()
