"""What the engine does is what was recorded: see `recorded.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers import recorded
from tests.workers.base_models.test_swapping import StoredModels


@pytest.mark.full
def test_tokens_are_those_recorded(tmp_path: Path) -> None:
    assert (
        recorded.served_tokens(StoredModels(tmp_path, recorded.FAMILIES)) == recorded.read().tokens
    )


@pytest.mark.full
def test_frames_of_a_simulation_are_those_recorded() -> None:
    assert recorded.simulated_frames() == recorded.read().frames


@pytest.mark.full
def test_messages_and_metrics_are_those_recorded() -> None:
    record = recorded.read()
    assert recorded.fields_of_messages() == record.messages
    assert recorded.names_of_metrics() == record.metrics
