"""Checks that every file of a Hugging Face folder is used, refused or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapters.format import chat_templates
from adapters.format.other_files import name_unused
from workers.importer.canonical import ImportRefused
from workers.importer.json_file import read_json
from workers.models.checkpoint import INDEX_FILE, SINGLE_FILE, weight_files

POOLING = "1_Pooling/config.json"
"""File in which Sentence Transformers stores how an embedding is computed from hidden states."""
MODULES = "modules.json"
"""File in which Sentence Transformers lists the modules of a model."""
COMPUTED = ("Transformer", "Pooling", "Normalize")
"""Modules of Sentence Transformers that are computed."""
USED = {
    *("config.json", "generation_config.json", SINGLE_FILE, INDEX_FILE),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *(chat_templates.FILE, chat_templates.FOLDER, MODULES, "1_Pooling"),
}


def refuse_files(source: Path) -> None:
    """Raises ImportRefused for a file that changes what the model computes and is not supported."""
    if (source / "adapter_config.json").is_file():
        raise ImportRefused(
            f"{source} has an adapter beside its weights (adapter_config.json), which transformers"
            " would apply to them: merge it into the weights, or move it to a folder of its own and"
            " push it"
        )
    if not (source / MODULES).is_file():
        return
    modules: Any = read_json(source / MODULES)
    for module in modules if isinstance(modules, list) else []:
        kind = str(module.get("type") if isinstance(module, dict) else module)
        if kind.rpartition(".")[2] not in COMPUTED:
            raise ImportRefused(
                f"{MODULES} has the module {kind}, which is not computed; allowed: {[*COMPUTED]}"
            )


def name_files(source: Path) -> list[str]:
    """Returns sentences that name the files that an import does not use."""
    used = USED | {path.name for path in weight_files(source)}
    return name_unused((path.name for path in source.iterdir()), used.__contains__)
