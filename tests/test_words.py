"""Words that have no ordinary meaning here are not in what the product says of itself: its code and
comments, the README, the docs and the changelog."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("loraplex", "gateway", "admin", "workers", "adapters", "memory", "ops")
"""Not migrations: a file that was applied must never change."""
TEXTS = (".py", ".sql", ".cpp", ".h", ".md")
HISTORY = ROOT / "docs" / "history"
"""Records of their time."""
PLAIN = {
    "guest": "tenant over its share",
    "guests": "tenants over their share",
    "giant": "long prompt",
    "giants": "long prompts",
    "liaison": "the task's own name",
    "disappoint": "fail",
    "disappointing": "bad",
    "twins": "duplicates",
    "whoever": "the caller, tenant, request or sequence that",
    "somebody": "a caller, tenant, request or sequence",
    "nobody": "no caller, tenant, request or sequence",
    "who": "the tenant, request or sequence that",
}
ACCOUNT = ("`nobody`", '"nobody"', "postgres or nobody", "default postgres, else nobody")
"""The account of that name."""
WORD = re.compile(rf"(?<![A-Za-z])({'|'.join(PLAIN)})(?![A-Za-z])", re.IGNORECASE)
FILES = [
    *(path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in TEXTS),
    *(path for path in (ROOT / "docs").rglob("*.md") if HISTORY not in path.parents),
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
]


def found(text: str) -> list[str]:
    """Each use of such a word, with its line and what to say."""
    for phrase in ACCOUNT:
        text = text.replace(phrase, "")
    return [
        f"line {number}: not {word!r} but {PLAIN[word.lower()]}"
        for number, line in enumerate(text.splitlines(), 1)
        for word in WORD.findall(line)
    ]


def test_words_are_plain() -> None:
    hits = {str(path.relative_to(ROOT)): found(path.read_text()) for path in FILES}
    assert {name: lines for name, lines in hits.items() if lines} == {}
    assert len(hits) > 300


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Nobody reads it.", 1),
        ("self._twins: whoever\nasks", 2),
        ("nobody's own", 1),
        ("whole giants", 1),
        ("else `nobody`, the account", 0),
        ("somebodys", 0),
    ],
)
def test_a_word_is_found(text: str, count: int) -> None:
    assert len(found(text)) == count
