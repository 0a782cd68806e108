"""Imports a model in a process of its own, so that its memory is freed afterwards.

This module is also the program of that process:

    python -m loraplex.box.importing PATH STORE HOME MIN_FREE FORMAT [TABLE_FORMAT]

The process prints `progress DONE TOTAL` lines, a `note TEXT` line for each sentence about what the
import does not use, and at the end `digest HEX`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from adapters.store.folder import NotInStore, Store, is_read_only
from loraplex.box.children import CHILD_FOLDER, python
from loraplex.death import die_with_parent
from loraplex.errors import BadSettings, ImportFailed, reason_of
from loraplex.output import ProgressCallback
from loraplex.private import read_private, write_private
from loraplex.settings import Settings

FORMATS = ("bfloat16", "keep", "int8", "int4")
"""Formats that `workers.importer.weight_formats` supports. They are repeated here, because that
module imports more than a command line should."""


class Formats(NamedTuple):
    """Storage formats of a model's matrices. `table_format` is the format of the embedding and
    output matrices, or None for the default that `weight_format` implies."""

    weight_format: str = "bfloat16"
    table_format: str | None = None


BFLOAT16 = Formats()


def check_source(source: Path) -> None:
    """Raises ImportFailed if the source cannot be imported, as far as its files show."""
    source = source.expanduser().absolute()
    if not source.exists():
        raise ImportFailed(f"{source} does not exist")
    if not ((source / "config.json").is_file() if source.is_dir() else source.suffix == ".gguf"):
        raise ImportFailed(
            f"{source} is neither a Hugging Face directory (with a config.json) nor a .gguf file"
        )


def import_model(
    source: Path,
    settings: Settings,
    progress: ProgressCallback,
    formats: Formats = BFLOAT16,
    note: Callable[[str], None] = lambda _: None,
) -> str:
    """Imports a model and returns its digest in the store. `note` gets sentences about what the
    source contains and the import does not use. Raises ImportFailed or BadSettings.

    An unchanged source, recognised by the names, sizes and times of its files, is not imported
    again.
    """
    check_source(source)
    source = source.expanduser().absolute()
    settings.make_home()
    known, mark = settings.home / "imports.json", _mark(source, formats)
    digest = _read_known(known).get(mark)
    try:
        if digest is None or not _is_there(settings.open_store(), digest):
            digest = _import_apart(source, settings, progress, formats, note)
            write_private(known, json.dumps(_read_known(known) | {mark: digest}, indent=2))
    except OSError as error:
        raise ImportFailed(f"{error.filename or source}: {reason_of(error)}") from error
    return digest


def imported_as(source: Path, settings: Settings, digest: str) -> Formats | None:
    """Returns the formats with which an earlier import of this source produced `digest`. Returns
    None if there was no such import, or if the source's files have changed since."""
    known, source = _read_known(settings.home / "imports.json"), source.expanduser().absolute()
    choices = itertools.starmap(Formats, itertools.product(FORMATS, (None, *FORMATS)))
    return next((each for each in choices if known.get(_mark(source, each)) == digest), None)


def _is_there(store: Store, digest: str) -> bool:
    """Returns whether the store has the model. A local cache of a remote store is sufficient."""
    try:
        store.model_folder(digest, weights=False)
    except NotInStore:
        return False
    return True


def _import_apart(
    source: Path,
    settings: Settings,
    progress: ProgressCallback,
    formats: Formats,
    note: Callable[[str], None],
) -> str:
    command = python("-m", "loraplex.box.importing", str(source), settings.store_location)
    command += [str(settings.home), str(settings.min_free_disk)]
    command += [each for each in formats if each is not None]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=CHILD_FOLDER,
        preexec_fn=die_with_parent(signal.SIGKILL),
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        digest = ""
        for line in child.stdout:
            match line.split():
                case ["progress", done, total]:
                    progress(int(done), int(total))
                case ["note", *_]:
                    note(line.removeprefix("note ").rstrip("\n"))
                case ["digest", found]:
                    digest = found
                case _:
                    pass
        complaint = child.stderr.read().strip()
    if child.returncode != 0 or not digest:
        raise ImportFailed(
            complaint.splitlines()[-1] if complaint else "the import process was killed"
        )
    return digest


def _read_known(path: Path) -> dict[str, str]:
    """Returns imported models' digests, by the hash of source and formats from `_mark`."""
    try:
        return json.loads(read_private(path))
    except FileNotFoundError:
        return {}


def _mark(source: Path, formats: Formats) -> str:
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    facts = [(str(file), (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    # The default formats are left out, so that marks of earlier versions, which had no formats,
    # still match.
    asked = [] if formats == BFLOAT16 else [each for each in formats if each is not None]
    return hashlib.sha256(repr(facts + asked).encode()).hexdigest()


def main() -> int:
    from workers.importer import import_model as import_here

    def report(done: int, total: int) -> None:
        print("progress", done, total, flush=True)

    def note(sentence: str) -> None:
        print("note", sentence.replace("\n", " "), flush=True)

    source, store, home, min_free, *rest = sys.argv[1:]
    formats: dict[str, Any] = Formats(*rest)._asdict()
    settings = Settings(store=store, data_dir=Path(home), min_free_disk=int(min_free))
    try:
        digest = import_here(Path(source), settings.open_store(), report, note=note, **formats)
    except (ValueError, OSError, BadSettings) as error:
        if isinstance(error, OSError) and is_read_only(error):
            error = ImportFailed(f"the store {store} cannot be written: {error.strerror}")
        print(str(error).replace("\n", " "), file=sys.stderr)
        return 1
    print("digest", digest, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
