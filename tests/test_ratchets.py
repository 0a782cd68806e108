"""Sizes of the engine that may only fall. A change that lowers one lowers its number here too."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.source_tree import NOT_READ, class_attributes, class_methods, source_tree

CORE = (
    *("workers.scheduling.sequence", "workers.scheduling.schedule"),
    *("workers.scheduling.scheduler", "workers.execution.engine", "workers.execution.answer"),
    "workers.execution.step_input",
    *("workers.execution.step_builder", "workers.execution.batch"),
    *("workers.execution.model_runner", "workers.execution.sampler"),
    *("memory.page_key", "memory.pages", "memory.block_table", "memory.kv_cache"),
    *("memory.prefix_cache", "adapters.pool.pool", "adapters.pool.tiers", "adapters.pool.device"),
)
"""Modules that a newcomer reads first: scheduler, memory, pool and model runner."""
CORE_LINES = 3_202

CLOSURES = {("Scheduler",): 25, ("Scheduler", "AdapterPool", "ModelRunner"): 55}
"""Number of modules that the classes' modules import, directly or not, themselves included.
Kernels, layers and model families do not count."""

CLASSES = {
    "AdapterPool": (7, 15),
    "DeviceTier": (10, 14),
    "Loads": (12, 14),
    "MemoryBroker": (6, 16),
    "Scheduler": (14, 27),
    "Engine": (15, 24),
    "Worker": (12, 12),
    "ServedModels": (11, 24),
    "PrefixCache": (7, 11),
    "IdlePages": (9, 16),
    "Sequence": (21, 22),
    "WorkerClient": (23, 20),
}
"""Number of attributes and methods of the largest classes."""

FOLDERS = {
    "workers/execution": 14,
    "workers/scheduling": 9,
    "memory": 10,
    "memory/eviction": 7,
    "adapters/pool": 12,
}
"""Number of files of the folders that hold the core, without empty ones."""


def test_lines_of_the_core() -> None:
    assert source_tree().num_lines(CORE) <= CORE_LINES


@pytest.mark.parametrize("names", CLOSURES, ids=" ".join)
def test_import_closures(names: tuple[str, ...]) -> None:
    tree = source_tree()
    modules = tree.reach(*map(tree.home_of, names), without=NOT_READ)
    print(f"{tree.num_lines(modules):,} lines in {len(modules)} modules")
    assert len(modules) <= CLOSURES[names], sorted(modules)


@pytest.mark.parametrize("name", CLASSES)
def test_sizes_of_classes(name: str) -> None:
    node = source_tree().class_node(name)
    most_attributes, most_methods = CLASSES[name]
    assert len(class_attributes(node)) <= most_attributes
    assert len(class_methods(node)) <= most_methods


def test_files_of_folders() -> None:
    tree = source_tree()
    sizes = Counter(
        str(path.parent.relative_to(tree.root))
        for path in tree.sources.values()
        if path.stat().st_size
    )
    too_large = {name: sizes[name] for name, most in FOLDERS.items() if sizes[name] > most}
    assert not too_large
