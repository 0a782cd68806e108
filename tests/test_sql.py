"""No SQL is put together from strings: every statement that is sent is a constant."""

from __future__ import annotations

import ast

import pytest

from tools.source_tree import source_tree

SENDING = {"fetch", "fetchrow", "fetchval", "execute", "executemany", "prepare", "cursor"}
EXCEPTIONS = {
    ("admin.migrate", "migration.text"): "a file of migrations/, checked by its checksum",
    ("admin.migrate", "statement"): "a part of such a file",
}


def statements(tree: ast.Module) -> list[ast.expr]:
    """What is given to a connection to be run."""
    return [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in SENDING
        and node.args
    ]


def constants(tree: ast.Module) -> set[str]:
    """Names that the module gives a literal text, once."""
    names = [
        (target.id, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    assigned = [name for name, _ in names]
    return {
        name
        for name, value in names
        if isinstance(value, ast.Constant)
        and isinstance(value.value, str)
        and assigned.count(name) == 1
    }


def is_constant(statement: ast.expr, known: set[str]) -> bool:
    """A literal, a name of one, or a query of a file in admin by its name."""
    match statement:
        case ast.Constant(value=str()):
            return True
        case ast.Name(id=name):
            return name in known
        case ast.Subscript(value=ast.Name(id="sql")):
            return True
        case _:
            return False


@pytest.mark.parametrize("package", ["store", "web", "admin", "gateway", "loraplex"])
def test_statements_are_constants(package: str) -> None:
    for module, tree in source_tree().trees.items():
        if not module.startswith(f"{package}."):
            continue
        known = constants(tree)
        for statement in statements(tree):
            shown = ast.unparse(statement)
            assert is_constant(statement, known) or (module, shown) in EXCEPTIONS, (
                f"{module}:{statement.lineno} sends {shown}"
            )
        if module != "store.queries":
            assert "sql" not in {
                node.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }, f"{module} has another `sql` than store.queries"


@pytest.mark.parametrize(
    "text",
    [
        'connection.execute(f"DROP TABLE {name}")',
        'connection.fetch("SELECT " + name)',
        'connection.fetchval("SELECT {}".format(name))',
        'query = "SELECT 1"\nquery = name\nconnection.fetchrow(query)',
        "connection.execute(query)",
    ],
)
def test_what_is_put_together_is_seen(text: str) -> None:
    tree = ast.parse(text)
    assert not all(is_constant(each, constants(tree)) for each in statements(tree))
