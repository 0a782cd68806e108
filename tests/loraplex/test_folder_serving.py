"""What is read of the files that training tools leave beside an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.errors import ApiFailure
from loraplex.folder_serving import describe_taken, read_folder_serving

NAMED = [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]

JOINED = "{% if tools is not none %}\nB{%+ else %}\nA{%+ endif %}"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, {}),
        ({"chat_template.jinja": "A"}, {"chat_template": "A"}),
        ({"tokenizer_config.json": {"chat_template": "A"}}, {"chat_template": "A"}),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, {"chat_template": JOINED}),
        ({"tokenizer_config.json": {"chat_template": NAMED[1:]}}, {"chat_template": "A"}),
        (
            {"chat_template.jinja": "A", "additional_chat_templates/tool_use.jinja": "B"},
            {"chat_template": JOINED},
        ),
        ({"additional_chat_templates/rag.jinja": "B"}, {}),
        (
            {"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": "B"}},
            {"chat_template": "A"},
        ),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, {}),
        (
            {
                "generation_config.json": {
                    "temperature": 0.6,
                    "top_k": -1,
                    "max_length": 4096,
                    "min_p": None,
                    "eos_token_id": [1, 2],
                    "do_sample": True,
                }
            },
            {"defaults": {"temperature": 0.6, "top_k": 0}, "stop_token_ids": [1, 2]},
        ),
        ({"generation_config.json": {"eos_token_id": 7}}, {"stop_token_ids": [7]}),
        ({"generation_config.json": []}, {}),
    ],
)
def test_what_is_found(tmp_path: Path, files: dict[str, Any], found: dict[str, Any]) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_folder_serving(tmp_path) == found


def test_templates_that_are_not_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use", "short"):
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text("A")
    said: list[str] = []
    read_folder_serving(tmp_path, said.append)
    assert said == [f"{tmp_path}: chat templates not used: rag, short"]
    (tmp_path / "additional_chat_templates/rag.jinja").write_bytes(b"\xff")
    with pytest.raises(ApiFailure, match="is not UTF-8"):
        read_folder_serving(tmp_path)


def test_generation_parameters_that_are_not_used_are_named(tmp_path: Path) -> None:
    given = {"temperature": 0.5, "num_beams": 4, "do_sample": True, "penalty_alpha": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(given | {"length_penalty": 1.0}))
    said: list[str] = []
    assert read_folder_serving(tmp_path, said.append) == {"defaults": {"temperature": 0.5}}
    assert said == [f"{tmp_path}: not used of generation_config.json: num_beams, penalty_alpha"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(ApiFailure, match=r"generation_config\.json is not"):
        read_folder_serving(tmp_path)


def test_what_is_said_of_it() -> None:
    found: dict[str, Any] = {
        "chat_template": "A",
        "defaults": {"temperature": 0.6, "top_p": 0.9},
        "stop_token_ids": [1, 7],
    }
    serving: dict[str, Any] = {
        "template": {"text": "A"},
        "defaults": {"temperature": 0.6},
        "stop_token_ids": [7],
    }
    taken = describe_taken({"serving": serving}, found, {})
    assert taken == "the chat template, temperature 0.6, stop token ids 7"
    nothing = {"template": None, "defaults": {}, "stop_token_ids": []}
    assert describe_taken({"serving": nothing}, found, {}) == ""
    given = {"chat_template": "A", "defaults": {"temperature": 0.6}, "stop_token_ids": [7]}
    assert describe_taken({"serving": serving}, found, given) == ""
    ends = nothing | {"stop_token_ids": [7]}
    assert describe_taken({"serving": ends}, {}, {}) == "stop token ids 7"
