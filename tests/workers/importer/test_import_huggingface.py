"""Hugging Face directories into the store: bit for bit, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError
from transformers import AutoTokenizer

from adapters.store.folder import LocalStore
from gateway.text.long_texts import LongTexts
from gateway.text.template_process import TemplateProcesses
from gateway.text.tokenizer import ModelTokenizer
from tests.doubles import CHAT_TEMPLATE, make_model
from tests.stored import kept
from workers.importer import ImportRefused, import_model
from workers.models.checkpoint import CheckpointError
from workers.models.spec import UnsupportedModel


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_model(tmp_path / "source", "qwen3")


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_are_taken_bit_for_bit(source: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    digest = import_model(
        source, LocalStore(tmp_path), lambda done, total: calls.append((done, total))
    )
    folder = tmp_path / "models" / digest
    weights = (source / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == weights
    assert calls[-1] == (len(weights), len(weights))
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_shards_and_their_index_are_kept(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="60KB")
    shards = {path.name: path.read_bytes() for path in source.glob("*.safetensors*")}
    assert len(shards) > 3
    folder = tmp_path / "models" / import_model(source, LocalStore(tmp_path))
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors*")} == shards
    again = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, atol=0, rtol=0)


def test_the_digest_is_of_the_content(source: Path, tmp_path: Path) -> None:
    first = import_model(source, LocalStore(tmp_path))
    assert import_model(source, LocalStore(tmp_path)) == first
    edit(source / "config.json", rms_norm_eps=1e-5)
    assert import_model(source, LocalStore(tmp_path)) != first
    assert len(list((tmp_path / "models").iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 1 << 40), ("top_p", 1.5), ("temperature", -1), ("repetition_penalty", "1.1")],
)
def test_defaults_that_no_request_could_have_are_refused(
    source: Path, tmp_path: Path, name: str, value: object
) -> None:
    edit(source / "generation_config.json", **{name: value})
    with pytest.raises(ImportRefused, match=rf"generation_config.json: .*{name}"):
        import_model(source, LocalStore(tmp_path))


def test_what_a_family_means_by_silence_is_spelled_out(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "gemma3_text")
    config = json.loads((source / "config.json").read_text())
    del config["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config))
    folder = tmp_path / "models" / import_model(source, LocalStore(tmp_path))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


TEMPLATES = {
    "default": "D{% for m in messages %}\n  {{ m.content }}\n{% endfor %}\n  ",
    "tool_use": "\n  {%- for tool in tools %}T {{ tool.function.name }}\n{% endfor %}\n"
    "{% macro last() %}{{ messages[-1].content }}{% endmacro %}\n   {{ last() }}\n",
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}


@pytest.mark.parametrize("names", [("default", "tool_use"), ("tool_use",), ("default",)])
@pytest.mark.parametrize("where", ["list", "files"])
def test_a_template_is_chosen_as_in_transformers(
    source: Path, tmp_path: Path, where: str, names: tuple[str, ...]
) -> None:
    """For conversations with tools and without."""
    (source / "chat_template.jinja").unlink(missing_ok=True)
    if where == "list":
        named = [{"name": name, "template": TEMPLATES[name]} for name in names]
        edit(source / "tokenizer_config.json", chat_template=named)
    else:
        edit(source / "tokenizer_config.json", chat_template="not this one")
        (source / "additional_chat_templates").mkdir()
        for name in names:
            file = "chat_template.jinja"
            if name != "default":
                file = f"additional_chat_templates/{name}.jinja"
            (source / file).write_text(TEMPLATES[name])
    folder = tmp_path / "models" / import_model(source, LocalStore(tmp_path))
    oracle, ours = (AutoTokenizer.from_pretrained(each) for each in (source, folder))
    chat = [{"role": "user", "content": "Hi"}]
    for tools in ([TOOL], None):
        try:
            expected = oracle.apply_chat_template(chat, tools=tools, tokenize=False)
        except ValueError as refusal:
            assert "no default" in str(refusal)
            with pytest.raises(TemplateError, match="only for conversations with tools"):
                ours.apply_chat_template(chat, tools=tools, tokenize=False)
        else:
            assert ours.apply_chat_template(chat, tools=tools, tokenize=False) == expected


def test_templates_that_are_not_used_are_named(source: Path, tmp_path: Path) -> None:
    (source / "chat_template.jinja").unlink(missing_ok=True)
    named = [{"name": name, "template": "x"} for name in ("rag", "short")]
    edit(source / "tokenizer_config.json", chat_template=named)
    notes: list[str] = []
    import_model(source, LocalStore(tmp_path), note=notes.append)
    assert "chat templates not used: rag, short" in notes


def test_pickles_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(ImportRefused, match=r"pytorch_model\.bin, a pickle"):
        import_model(source, LocalStore(tmp_path))
    assert list((tmp_path / "models").iterdir()) == []


def test_what_is_missing_or_broken_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        content = (source / name).read_text()
        (source / name).write_text("{ not json")
        with pytest.raises(ImportRefused, match=name):
            import_model(source, LocalStore(tmp_path))
        (source / name).unlink()
        with pytest.raises(ImportRefused, match=name):
            import_model(source, LocalStore(tmp_path))
        (source / name).write_text(content)
    edit(source / "config.json", intermediate_size=128)
    with pytest.raises(CheckpointError, match="gate_proj"):
        import_model(source, LocalStore(tmp_path))
    edit(source / "config.json", model_type="mamba")
    with pytest.raises(UnsupportedModel, match="mamba"):
        import_model(source, LocalStore(tmp_path))
    assert list((tmp_path / "models").iterdir()) == []


def test_a_kill_in_the_middle_leaves_no_model(source: Path, tmp_path: Path) -> None:
    """A process that dies while copying: the next import is complete, and has the same digest."""
    script = (
        "import os, sys; from pathlib import Path; from adapters.store.folder import LocalStore\n"
        "from workers.importer import import_model; store = LocalStore(Path(sys.argv[2]))\n"
        "import_model(Path(sys.argv[1]), store, lambda done, total: os._exit(9))"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", script, str(source), str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == 9
    store = LocalStore(tmp_path)
    assert kept(store, "models") == []
    assert len(list(store.incoming.iterdir())) == 1
    store.sweep(max_age_s=-1)
    assert list(store.incoming.iterdir()) == []
    assert (store.model_folder(import_model(source, store)) / "model.safetensors").is_file()


def test_a_disk_without_room_is_left_alone(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        import_model(source, LocalStore(tmp_path, min_free_bytes=1 << 60))
    assert caught.value.errno == errno.ENOSPC
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize(
    ("mode", "pooling"), [("lasttoken", "last"), ("mean_tokens", "mean"), ("cls_token", "cls")]
)
def test_the_pooling_of_sentence_transformers_is_kept(
    source: Path, tmp_path: Path, mode: str, pooling: str
) -> None:
    modes = {f"pooling_mode_{name}": name == mode for name in ("lasttoken", "mean_tokens")}
    write_pooling(source, {"include_prompt": True, **modes, f"pooling_mode_{mode}": True})
    folder = tmp_path / "models" / import_model(source, LocalStore(tmp_path))
    assert json.loads((folder / "pooling.json").read_text()) == {"pooling": pooling}
    assert ModelTokenizer(folder, LongTexts(), TemplateProcesses()).pooling == pooling


@pytest.mark.parametrize(
    "modes", [{}, {"max_tokens": True}, {"lasttoken": True, "cls_token": True}]
)
def test_other_poolings_are_refused_by_name(
    source: Path, tmp_path: Path, modes: dict[str, bool]
) -> None:
    write_pooling(source, {f"pooling_mode_{mode}": is_on for mode, is_on in modes.items()})
    with pytest.raises(ImportRefused, match="allowed is one of"):
        import_model(source, LocalStore(tmp_path))


def write_pooling(source: Path, config: dict[str, bool]) -> None:
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps(config))
