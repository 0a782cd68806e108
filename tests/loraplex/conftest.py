"""Planes of tests/admin and tests/gateway, for commands that talk to them."""

from tests.admin.conftest import app, base, plane
from tests.gateway.conftest import live

__all__ = ["app", "base", "live", "plane"]
