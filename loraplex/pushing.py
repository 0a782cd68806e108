"""Uploads an adapter folder. A small one is sent in one request. A large one is sent in pieces, so
that the upload can resume after a lost connection."""

from __future__ import annotations

import base64
import io
import json
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from adapters.format.signature import sign, sign_upload
from adapters.format.validator import CONFIG_NAME, WEIGHTS_NAME, AdapterFiles, content_digest
from admin.adapters.chat_template import check_template
from admin.adapters.serving_data import check_names, parse_serving
from loraplex.adapter_folder import check_folder, name_others
from loraplex.api import Api
from loraplex.converted_folder import converted
from loraplex.errors import ApiFailure, NoAnswer, Refused
from loraplex.output import ProgressCallback, tell
from loraplex.tar import Tar
from store.errors import Invalid

IN_PIECES_ABOVE = 64 << 20
PIECE_BYTES = 8 << 20
PATIENCE_S = 120.0
"""Maximum seconds for which the server may be unavailable or busy during an upload."""
LOOK_S = 0.2
TRY_AGAIN = ("upload_offset", "upload_busy")
"""Codes of refusals that may follow a lost connection until the server notices the loss."""

Version = dict[str, Any]


def push(api: Api, folder: Path, fields: dict[str, Any], report: ProgressCallback) -> Version:
    """Uploads a folder and returns the version, which need not be ready. `fields` has the fields of
    the upload route, and optionally `sign`, the private key that signs the content.

    Errors that do not depend on the files are raised before the files are sent. Waits while too
    many uploads are in progress. `report` gets the number of bytes sent. Raises ApiFailure.
    """
    for sentence in name_others(folder):
        tell(f"{folder}: {sentence}")
    with converted(folder, tell) as sent:
        return _push(api, sent, fields, report)


def _push(api: Api, folder: Path, fields: dict[str, Any], report: ProgressCallback) -> Version:
    files = [folder / CONFIG_NAME, folder / WEIGHTS_NAME]
    check_folder(folder, tell)
    _check(api, fields)
    if (key := fields.get("sign")) is not None:
        digest = content_digest(AdapterFiles.in_folder(folder))
        fields = {name: value for name, value in fields.items() if name != "sign"}
        signatures = {
            "signature": sign(key, digest),
            "upload_signature": sign_upload(key, digest, fields),
        }
        fields |= {name: base64.b64encode(raw).decode() for name, raw in signatures.items()}
    is_large = num_bytes(folder) > IN_PIECES_ABOVE
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if is_large:
                return push_in_pieces(api, folder, fields, report)
            return _push_at_once(api, files, fields, report)
        except Refused as error:
            if error.code != "too_many_uploads" or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.5, 1.5))


def num_bytes(folder: Path) -> int:
    """Returns the size in bytes of the files that `push` sends."""
    files = (folder / CONFIG_NAME, folder / WEIGHTS_NAME)
    return sum(file.stat().st_size for file in files if file.is_file())


def wait_ready(
    api: Api, version: Version, tenant: str | None, tell: Callable[[str], None]
) -> Version:
    """Waits until a version can be served, or needs only an admin's approval of its chat template,
    and returns it. `tell` gets texts about what the version waits for. Raises Refused if the
    version is rejected."""
    path, said = f"/admin/v1/adapters/{version['name']}/versions/{version['version']}", None
    while version["state"] == "proving" or (version["state"] == "ready" and not version["served"]):
        detail = version["proving"]["detail"] if version["proving"] else "proved"
        if detail != said:
            tell(said := detail)
        time.sleep(LOOK_S)
        version = api.get(path, tenant=tenant)
    if version["state"] == "rejected":
        raise Refused(version["error"])
    return version


def _check(api: Api, fields: dict[str, Any]) -> None:
    """Raises ApiFailure if a name is invalid or taken, the key may not push, or the tenant or the
    model does not exist."""
    name, model = fields.get("name", ""), fields.get("model")
    try:
        check_names(name, model, fields.get("alias"))
        for field in ("serving", "folder_serving"):
            serving = parse_serving(json.dumps(fields.get(field, {})), field)
            if serving.chat_template is not None:
                check_template(serving.chat_template, field)
    except Invalid as error:
        raise ApiFailure(str(error)) from None
    api.get("/admin/v1/uploads/rejected", tenant=fields.get("tenant"))
    if model is not None:
        api.get(f"/admin/v1/models/{model}")
    if any(base["name"] == name for base in api.all("/admin/v1/models")):
        raise ApiFailure(f"a base model is named {name}")


def _push_at_once(
    api: Api, files: list[Path], fields: dict[str, Any], report: ProgressCallback
) -> Version:
    total, done = sum(file.stat().st_size for file in files), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(done, total)

    form = {name: json.dumps(v) if isinstance(v, dict | bool) else v for name, v in fields.items()}
    with ExitStack() as stack:
        opened = {file.name: stack.enter_context(_Counted(file, count)) for file in files}
        return api.upload("/admin/v1/adapters", form, opened)


class _Counted(io.FileIO):
    """File that reports the number of bytes read from it."""

    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        super().__init__(path)
        self._count = count

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self._count(len(data))
        return data


def push_in_pieces(
    api: Api,
    folder: Path,
    fields: dict[str, Any],
    report: ProgressCallback,
    piece_bytes: int = PIECE_BYTES,
) -> Version:
    """Uploads a folder of any size in pieces. Has the arguments and errors of `push`."""
    archive = Tar([folder / CONFIG_NAME, folder / WEIGHTS_NAME])
    upload = api.post("/admin/v1/uploads", {"bytes": archive.size, "filename": "adapter.tar"})
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            offset = api.get(f"/admin/v1/uploads/{upload['id']}")["offset"]
            while offset < archive.size:
                piece = archive.read(offset, piece_bytes)
                offset = api.append(f"/admin/v1/uploads/{upload['id']}", offset, piece)["offset"]
                deadline = time.monotonic() + PATIENCE_S
                report(offset, archive.size)
            return api.post("/admin/v1/adapters", {"upload": upload["id"], **fields})
        except (NoAnswer, Refused) as error:
            if isinstance(error, Refused):
                if error.code == "upload_not_found" and (made := _find(api, folder, fields)):
                    # The upload is complete, and only the answer was lost.
                    return made
                if error.code not in TRY_AGAIN:
                    raise
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)


def _find(api: Api, folder: Path, fields: dict[str, Any]) -> Version | None:
    """Returns the newest version with the same content as the folder, or None."""
    digest = content_digest(AdapterFiles.in_folder(folder))
    path = f"/admin/v1/adapters/{fields['name']}/versions"
    found = api.all(path, cursor="version", tenant=fields.get("tenant"))
    return next((version for version in reversed(found) if version["digest"] == digest), None)
