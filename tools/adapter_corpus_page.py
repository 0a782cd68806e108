"""`python -m tools.adapter_corpus_page`: writes the table of docs/use/adapter-corpus.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adapters.hints import hint_for
from tools.source_tree import ROOT

CORPUS = ROOT / "tests/adapters/corpus.jsonl"
PAGE = ROOT / "docs/use/adapter-corpus.md"
BEGIN, END = "<!-- begin of the table -->\n", "<!-- end of the table -->\n"


def entries(corpus: Path = CORPUS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in corpus.read_text().splitlines()]


def table() -> str:
    """Returns the table in Markdown. Versions of a tool share a row if their configuration, source
    and verdict are the same."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for entry in entries():
        source = "documented form" if entry["is_documented"] else "written by it"
        row = (entry["tool"], entry["kind"], source, entry["verdict"])
        rows.setdefault(row, []).append(entry["version"])
    lines = [
        "| tool and versions | configuration | source | verdict |",
        "| --- | --- | --- | --- |",
    ]
    for (tool, kind, source, verdict), versions in rows.items():
        named = f"{tool} {', '.join(versions)}".strip(" ,")
        shown = verdict if verdict == "accepted" else f"refused: `{verdict}`. {hint_for(verdict)}"
        lines.append(f"| {named} | {kind} | {source} | {shown.strip()} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(head + BEGIN + "\n" + table() + "\n" + END + tail)


if __name__ == "__main__":
    main()
