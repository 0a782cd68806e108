"""Checks an adapter folder that a training tool wrote, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from adapters.errors import AdapterRejected
from adapters.format.configuration import MAX_CONFIG_BYTES, parse_config
from adapters.format.other_files import name_unused
from adapters.format.tensor_headers import read_header
from adapters.format.tensor_names import read_names
from adapters.format.validator import CONFIG_NAME, PICKLE_NAMES, WEIGHTS_NAME
from loraplex.errors import ApiFailure, Refused

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


USED = {
    *(CONFIG_NAME, WEIGHTS_NAME, *PICKLE_NAMES, "adapter_model.safetensors.index.json"),
    *("adapters.safetensors", "chat_template.jinja", "additional_chat_templates"),
    *("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"),
    *("generation_config.json", "added_tokens.json"),
}
"""Names of files in an adapter's folder that a push uses or has a message of its own about."""
_SHARD = re.compile(r"adapter_model-\d+-of-\d+\.safetensors")


def find_adapter(folder: Path, tell: Callable[[str], None]) -> Path:
    """Returns the folder itself, or its only subfolder with an adapter if it has none itself. peft
    writes such a subfolder for an adapter with a name of its own."""
    if any((folder / name).exists() for name in (CONFIG_NAME, WEIGHTS_NAME, *PICKLE_NAMES)):
        return folder
    inner = [path.parent for path in sorted(folder.glob(f"*/{CONFIG_NAME}"))]
    if len(inner) != 1:
        return folder
    tell(f"{folder} has no {CONFIG_NAME}: the adapter in {inner[0]} is pushed")
    return inner[0]


def name_others(folder: Path) -> list[str]:
    """Returns sentences that name the files in an adapter's folder that a push does not use."""
    names = [path.name for path in folder.iterdir()]
    return name_unused(names, lambda name: name in USED or _SHARD.fullmatch(name) is not None)


def check_folder(folder: Path, warn: Callable[[str], None]) -> None:
    """Checks that the folder has the two files of an adapter and that the adapter can be served, as
    far as this is known without the base model. Passes warnings to `warn`.

    Raises ApiFailure, which names what is wrong in the folder, or Refused for the adapter.
    """
    config, weights = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    pickle = next((folder / name for name in PICKLE_NAMES if (folder / name).is_file()), None)
    if config.is_file() and weights.is_file() and pickle is not None:
        _compare_ages(pickle, weights, warn)
    if (instead := _found_instead(folder, pickle)) is not None:
        raise ApiFailure(f"{folder} {instead}")
    for file in (config, weights):
        if not file.is_file():
            raise ApiFailure(f"{folder} has no {file.name}")
    try:
        with config.open("rb") as file:
            parse_config(file.read(MAX_CONFIG_BYTES + 1))
        with weights.open("rb") as file:
            read_names(read_header(file, weights.stat().st_size).tensors)
    except AdapterRejected as rejected:
        raise Refused(rejected.to_dict()) from None


def _compare_ages(pickle: Path, weights: Path, warn: Callable[[str], None]) -> None:
    if pickle.stat().st_mtime_ns > weights.stat().st_mtime_ns:
        raise ApiFailure(
            f"{pickle} is newer than {weights.name} beside it, so which file is meant cannot be"
            f" known: delete the one that is not, or save {weights.name} again"
        )
    warn(f"{pickle} is ignored: {weights.name} beside it is newer or as old")


def _found_instead(folder: Path, pickle: Path | None) -> str | None:
    """Returns what the folder has instead of an adapter, with advice, or None if unknown."""
    has_config, has_weights = (folder / CONFIG_NAME).is_file(), (folder / WEIGHTS_NAME).is_file()
    if has_config and not has_weights and pickle is not None:
        return (
            f"has {pickle.name}, a pickle, which is never opened here. Convert it:\n"
            "  import safetensors.torch, torch\n"
            f"  safetensors.torch.save_file(torch.load({str(pickle)!r}, map_location='cpu',"
            f" weights_only=True), {str(folder / WEIGHTS_NAME)!r})"
        )
    if has_config or has_weights:
        return None
    return _found_without_adapter(folder)


def _found_without_adapter(folder: Path) -> str | None:
    if any(folder.glob("*.gguf")):
        return (
            "has a GGUF file: adapters are served from peft's files, so push the folder that it was"
            " converted from"
        )
    if (folder / "config.json").is_file():
        return (
            f"has a whole model (config.json) and no {CONFIG_NAME}: register it with loraplex model"
            " add, or push the adapter that it was merged from"
        )
    inner = sorted(path.parent for path in folder.glob(f"*/{CONFIG_NAME}"))
    checkpoints = [
        (int(match[1]), file.name) for file in inner if (match := _CHECKPOINT.fullmatch(file.name))
    ]
    others = [str(file) for file in inner if not _CHECKPOINT.fullmatch(file.name)]
    if others:
        return f"has no {CONFIG_NAME}, only adapters in folders: push {', '.join(others[:20])}"
    if not checkpoints:
        return None
    newest = folder / max(checkpoints)[1]
    return (
        f"has no {CONFIG_NAME} of its own, only {len(checkpoints)} checkpoint(s): push one of them,"
        f" such as {newest} --name {folder.resolve().name}"
    )
