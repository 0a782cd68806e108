"""Tables show what is in them, whatever it is, in the room there is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import click
import pytest
from rich.cells import cell_len

from loraplex.output import set_form, show_list, show_one
from loraplex.tables import Column, Kind, age, exact, fitted, size, tabbed, wrapped

NOW = datetime(2026, 11, 1, tzinfo=UTC)
FIELD = Column("field", "field")


@contextmanager
def chosen(form: str) -> Iterator[None]:
    """A running command whose options chose the format."""
    command = click.Command("list", params=[form_parameter(form)])
    with command.make_context("list", [f"--{form}"]):
        yield


def form_parameter(form: str) -> click.Option:
    return click.Option([f"--{form}"], is_flag=True, expose_value=False, callback=set_form)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("[/x]", "[/x]"),
        ("[red]hot[/red]", "[red]hot[/red]"),
        (":smile:", ":smile:"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("a\rb", "a\\rb"),
        ({"name": "[/x]"}, "name=[/x]"),
        ("Grüße, 世界", "Grüße, 世界"),
        ("one\ntwo\tthree", "one\\ntwo\\tthree"),
    ],
)
def test_what_others_wrote_is_only_text(value: object, shown: str, capsys: pytest.CaptureFixture):
    rows = [{"field": value}]
    show_list(rows, [FIELD])
    assert capsys.readouterr().out.splitlines() == ["field", shown]
    assert list(fitted(rows, [FIELD], 80, NOW)) == ["FIELD", shown]
    show_one({"field": value})
    assert capsys.readouterr().out.splitlines() == [f"field\t{shown}"]


def test_json_is_an_object_for_one_and_a_list_for_many(capsys: pytest.CaptureFixture):
    with chosen("json"):
        show_one({"a": 1})
        assert json.loads(capsys.readouterr().out) == {"a": 1}
        show_list([{"a": 1}], [])
        assert json.loads(capsys.readouterr().out) == [{"a": 1}]
        show_list([], [])
        assert json.loads(capsys.readouterr().out) == []


def test_texts_are_cut_and_wrapped_between_words():
    rows = [{"name": "a", "said": "the worker does not answer any more"}]
    columns = [Column("name", "name", Kind.NAME), Column("said", "said", Kind.TEXT)]
    assert list(fitted(rows, columns, 28, NOW))[1] == "a     the worker does not…"
    text = "loraplex: the port 8000 is taken; choose another with --port"
    assert wrapped(text, 40).split("\n") == [
        "loraplex: the port 8000 is taken; choose",
        "  another with --port",
    ]
    assert wrapped("/a/very/long/path/of/more/than/the/width", 20).count("\n") == 0


def test_wide_is_a_table_of_all_columns_in_a_pipe_too(capsys: pytest.CaptureFixture):
    columns = [Column(name, name) for name in ("first", "second")]
    with chosen("wide"):
        show_list([{"first": "x" * 200, "second": "y" * 200}], columns)
    assert capsys.readouterr().out.splitlines()[1] == f"{'x' * 200}  {'y' * 200}"


def test_cells_are_those_of_a_terminal_and_not_characters():
    columns = [Column("a", "a", Kind.NAME), Column("b", "b", Kind.NUMBER)]
    lines = list(fitted([{"a": "世界", "b": 1}, {"a": "ab", "b": 22}], columns, 80, NOW))
    assert lines == ["A      B", "世界   1", "ab    22"]
    (_, line) = fitted([{"a": "世" * 40}], columns, 20, NOW)
    assert (line.count("世"), cell_len(line)) == (9, 20)


def test_a_pipe_has_exact_values():
    columns = [Column("a", "a", Kind.SIZE), Column("b", "b", Kind.AGE)]
    rows = [{"a": 1 << 30, "b": "2026-10-31T00:00:00Z"}]
    assert list(tabbed(rows, columns)) == ["a\tb", "1073741824\t2026-10-31T00:00:00Z"]
    assert list(fitted(rows, columns, 80, NOW)) == ["    A  B", "1 GiB  1 day ago"]


def test_numbers_are_written_out_and_what_is_inside_has_brackets():
    assert [exact(each) for each in (1e-05, 0.25, 12345.678, 1e6)] == [
        "0.00001",
        "0.25",
        "12346",
        "1000000",
    ]
    nested = {"stop": ["a", "b"], "defaults": {"temperature": 0, "top_k": 5}, "tags": ["x"]}
    assert exact(nested) == "stop=(a, b), defaults=(temperature=0, top_k=5), tags=x"


def test_no_rows():
    assert list(fitted([], [FIELD], 80, NOW)) == ["(none)"]
    assert list(tabbed([], [FIELD])) == ["field"]


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1024 * 1024 - 1, "1 MiB"),
        (1288490189, "1.2 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes(num_bytes: int, shown: str):
    assert size(num_bytes) == shown


@pytest.mark.parametrize(
    ("span", "shown"),
    [
        (timedelta(seconds=-0.4), "now"),
        (timedelta(seconds=-59), "59 s ago"),
        (timedelta(minutes=-3), "3 min ago"),
        (timedelta(hours=23), "in 23 h"),
        (timedelta(days=-1), "1 day ago"),
        (timedelta(days=30), "in 30 days"),
        (timedelta(days=-400), "2025-09-27"),
    ],
)
def test_ages(span: timedelta, shown: str):
    assert age(NOW + span, NOW) == shown
