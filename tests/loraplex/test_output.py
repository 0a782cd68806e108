"""Tables show what is in them, whatever it is."""

import pytest

from loraplex.output import show


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
    ],
)
def test_what_others_wrote_is_only_text(value: object, shown: str, capsys: pytest.CaptureFixture):
    show([{"field": value}], ("field",), as_json=False)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["field", shown]


def test_lines_of_a_text_stay_lines(capsys: pytest.CaptureFixture):
    show([{"field": "one\ntwo"}], ("field",), as_json=False)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["field", "one", "two"]
