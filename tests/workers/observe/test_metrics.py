"""What a worker's page says of its adapters."""

from __future__ import annotations

from workers.observe.metrics import OF_WORKER
from workers.wire.status import AdapterStatus, WorkerStatus


def figures(name: str, *adapters: AdapterStatus) -> list[tuple[float, dict[str, str]]]:
    status = WorkerStatus(
        instance_id="w",
        draining=False,
        models=[],
        adapters=list(adapters),
        arena_bytes=0,
        extents="",
        settings={"max_loaded_adapters": "8"},
        step=0,
        tokens_per_s=0.0,
        num_cached_adapters=40,
        cached_adapter_bytes=4000,
        adapter_counts={"host": 2, "device": 1},
        adapter_bytes={"host": 200, "device": 100},
    )
    (read,) = [each.read for each in OF_WORKER if each.name == name]
    found = read(status)
    assert not isinstance(found, int | float)
    return [(value, dict(labels)) for value, labels in found]


def adapter(digit: str, tier: str, name: str = "") -> AdapterStatus:
    return AdapterStatus(digit * 64, tier, 100, 0, False, name=name)


def test_adapters_have_the_names_that_requests_ask_for() -> None:
    """While one takes the place of another; two tenants have a `bot`."""
    ((_, labels),) = figures(
        "vllm:lora_requests_info",
        adapter("1", "device", "bot@7"),
        adapter("2", "device", "formatter@1"),
        adapter("3", "device", "bot@1"),
        adapter("4", "loading", "notes@2"),
        adapter("5", "host", "leaving@1"),
        adapter("6", "device"),
    )
    assert labels == {
        "max_lora": "8",
        "running_lora_adapters": "bot,formatter,666666666666",
        "waiting_lora_adapters": "notes",
    }


def test_the_disk_cache_is_a_tier() -> None:
    held = adapter("1", "device"), adapter("2", "host"), adapter("3", "host")
    number, size = figures("loraplex_adapters", *held), figures("loraplex_adapter_bytes", *held)
    assert {labels["tier"]: value for value, labels in number} == {
        "host": 2,
        "device": 1,
        "loading": 0,
        "disk": 40,
    }
    assert {labels["tier"]: value for value, labels in size}["disk"] == 4000
