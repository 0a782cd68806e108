"""The schema that all migrations together make, as one file to read.

`python -m tools.schema` writes `migrations/schema.sql`; `make schema` runs it.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

import migrations
from admin.migrate import SCHEMA
from loraplex.box.postgres import find_binaries
from tests.postgres import fresh_database

FILE = Path(migrations.__path__[0]) / SCHEMA
HEAD = """\
-- The whole schema, for reading: each table with its keys, indexes, triggers, policies and rights,
-- then the functions. Databases are made of the numbered files beside this one. `make schema`
-- writes it, and a test compares it with what those files make.
"""

_ENTRY = re.compile(r"^-- Name: (.+); Type: (.+); Schema: .*$", re.MULTILINE)
_CONSTRAINT = re.compile(r"ALTER TABLE ONLY \S+\n    ADD (CONSTRAINT .*);", re.DOTALL)


def dump(dsn: str, *options: str) -> str:
    """As pg_dump writes it."""
    command = [str(find_binaries() / "bin/pg_dump"), "--schema-only", *options, dsn]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # A random word of each dump.
    return "\n".join(line for line in text.splitlines() if "restrict " not in line)


def schema(dsn: str) -> str:
    """The contents of `schema.sql`. Partitions are left out: they are made and dropped daily."""
    parts = _ENTRY.split(dump(dsn, "--no-owner", "--exclude-table=usage_[0-9]*"))
    entries = [
        (name, kind, _statement(text))
        for name, kind, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    ]
    tables: dict[str, str] = {}
    others: list[str] = []
    functions: dict[str, list[str]] = defaultdict(list)
    columns: dict[str, list[str]] = defaultdict(list)
    after: dict[str, list[str]] = defaultdict(list)
    for name, kind, statement in entries:
        match kind:
            case "TABLE":
                tables[name] = statement
            case "CONSTRAINT" | "FK CONSTRAINT":
                (constraint,) = _CONSTRAINT.findall(statement)
                columns[name.split()[0]].append(constraint)
            case "INDEX":
                after[re.findall(r" ON (?:ONLY )?(\w+)", statement)[0]].append(statement)
            case "TRIGGER" | "ROW SECURITY" | "POLICY":
                after[name.split()[0]].append(statement)
            case "SEQUENCE" if statement.startswith("ALTER TABLE "):
                after[statement.split()[2]].append(statement)
            case "ACL" if name.startswith("TABLE "):
                after[name.split()[1]].append(statement)
            case "FUNCTION":
                functions[name].append(statement)
            case "ACL" if name.startswith("FUNCTION "):
                functions[name.removeprefix("FUNCTION ")].append(statement)
            case _:
                others.append(statement)
    blocks = ["\n".join(others)]
    for name, statement in sorted(tables.items()):
        table = _with_constraints(statement, columns.pop(name, []))
        blocks.append("\n".join([table, *after.pop(name, [])]))
    blocks += ["\n".join(functions[name]) for name in sorted(functions)]
    assert not columns and not after, (columns, after)
    return "\n\n".join([HEAD.rstrip(), *blocks]) + "\n"


def _statement(text: str) -> str:
    """Without what pg_dump says around it, and without the name of the one schema."""
    lines = [line for line in text.split("\n") if line != "--" and not line.startswith("-- ")]
    return re.sub(r"\bpublic\.", "", "\n".join(lines).strip())


def _with_constraints(table: str, constraints: list[str]) -> str:
    body, close, tail = table.rpartition("\n)")
    return body + "".join(f",\n    {each}" for each in constraints) + close + tail


def main() -> None:
    with fresh_database() as dsn:
        FILE.write_text(schema(dsn))


if __name__ == "__main__":
    main()
