"""Unpacks and validates untrusted uploads, and parses their chat templates, in a sandboxed process:
`python -m admin.uploads.sandbox`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import AdapterRejected
from adapters.format.patterns import CPU_S
from adapters.format.validator import AdapterFiles, Limits, Validated, validate_and_list
from adapters.manifest import BaseModelShape
from adapters.store.folder import check_free_space
from admin.adapters.chat_template import check_template
from admin.uploads.archive import StagingFolder, extract
from sandbox.server import serve
from store.errors import Invalid
from web.errors import TooLarge

NICENESS = 10
"""Niceness of the process, so that streaming answers have priority."""


class Upload(msgspec.Struct, frozen=True):
    folder: str
    """Folder that has the adapter's two files, or into which the archive is unpacked."""
    archive: str | None
    bases: list[BaseModelShape]
    max_rank: int
    max_bytes: int
    """Maximum bytes of the adapter's files together."""
    max_image_bytes: int
    """Maximum bytes of the packed image in bfloat16."""
    min_free_bytes: int
    """Bytes of the disk that unpacking must leave free."""
    chat_templates: dict[str, str] = {}
    """Texts of chat templates, by the name of the upload's field that has them."""


class Rejected(msgspec.Struct, frozen=True, tag=True):
    error: dict[str, Any]
    """Fields of the AdapterRejected that validation raised."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Refusal of a chat template, or of an archive that is too large or cannot be read."""

    is_too_large: bool
    message: str
    code: str
    param: str | None


class DiskFailed(msgspec.Struct, frozen=True, tag=True):
    errno: int | None
    message: str


Outcome = Validated | Rejected | Refused | DiskFailed


def main() -> None:
    os.nice(NICENESS)
    serve(lambda work: msgspec.json.encode(_validate(msgspec.json.decode(work, type=Upload))))


def _validate(upload: Upload) -> Outcome:
    folder = Path(upload.folder)
    warnings: list[str] = []
    try:
        for field, template in upload.chat_templates.items():
            check_template(template, field)
        if upload.archive is not None:
            check_room = partial(check_free_space, folder, upload.min_free_bytes)
            target = StagingFolder(folder, upload.max_bytes, check_room)
            warnings = extract(Path(upload.archive), target)
        limits = Limits(upload.max_rank, upload.max_bytes, upload.max_image_bytes, CPU_S)
        validated = validate_and_list(AdapterFiles.in_folder(folder), upload.bases, limits)
        return validated.warning(*warnings)
    except AdapterRejected as rejected:
        return Rejected(rejected.to_dict())
    except (Invalid, TooLarge) as refused:
        is_too_large = isinstance(refused, TooLarge)
        return Refused(is_too_large, str(refused), str(refused.code), refused.param)
    except OSError as error:
        return DiskFailed(error.errno, str(error))


if __name__ == "__main__":
    main()
