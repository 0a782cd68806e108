"""A request to the admin plane, with what its handlers need at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from litestar import Request
from litestar.datastructures import State

from admin.records import ApiKey

if TYPE_CHECKING:
    from admin.plane import AdminPlane


class AdminRequest(Request[ApiKey, Any, State]):
    """`user` is the key the guard let pass."""

    @property
    def plane(self) -> AdminPlane:
        return self.app.state.admin
