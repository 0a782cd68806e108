"""What the process that imports a model reports to the command."""

from __future__ import annotations

from pathlib import Path

from loraplex.box.importing import import_model
from loraplex.settings import Settings
from tests.doubles import make_model


def test_files_that_are_not_used_are_named_once(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "qwen3")
    (source / "preprocessor_config.json").write_text("{}")
    notes: list[str] = []
    settings = Settings(data_dir=tmp_path / "data")
    import_model(source, settings, lambda *_: None, note=notes.append)
    assert notes == ["not used: preprocessor_config.json"]
    import_model(source, settings, lambda *_: None, note=notes.append)
    assert len(notes) == 1
