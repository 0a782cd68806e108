"""The admin plane of tests/admin, for commands that talk to it."""

from tests.admin.conftest import app, base, database, dsn, empty_dsn, owner, plane

__all__ = ["app", "base", "database", "dsn", "empty_dsn", "owner", "plane"]
