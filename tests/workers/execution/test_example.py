"""The example of an engine, and the page that explains it."""

from __future__ import annotations

import re

from examples import engine
from tests.preloaded import ROOT
from tests.test_ratchets import READ_FIRST
from tools.source_tree import NOT_READ, source_tree


def test_two_adapters_of_one_batch_have_their_own_tokens() -> None:
    tokens = engine.run(["polite", "rude"])
    assert [len(each) for each in tokens.values()] == [8, 8, 8]
    assert len(set(map(tuple, tokens.values()))) == 3
    assert engine.run(["polite", "rude"]) == tokens


def test_example_and_page_stay_short() -> None:
    page = ROOT / "docs" / "understand" / "engine.md"
    lines = [path.read_text().count("\n") for path in (page, ROOT / "examples" / "engine.py")]
    assert lines[0] <= 150 and lines[1] <= 80


def test_the_page_names_files_that_are_there() -> None:
    page = (ROOT / "docs" / "understand" / "engine.md").read_text()
    paths = [word for word in page.split("`") if "/" in word and word.endswith(".py")]
    assert paths and not [path for path in paths if not (ROOT / path).is_file()]


def test_the_page_lists_the_core() -> None:
    """Each file that the engine, its scheduler, pool and runner import, and no other."""
    page = (ROOT / "docs" / "understand" / "engine.md").read_text()
    table = page.split("## Order of reading")[1].split("Then read")[0]
    listed: list[str] = []
    folder = ""
    for path in re.findall(r"`([\w/]+)\.py`", table):
        *folders, name = path.split("/")
        folder = ".".join(folders) or folder
        listed.append(f"{folder}.{name}")
    tree = source_tree()
    core = tree.reach(*map(tree.home_of, READ_FIRST), without=NOT_READ)
    assert sorted(listed) == sorted(core)
