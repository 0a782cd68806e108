"""Defines the authenticated caller of a request."""

from __future__ import annotations

import msgspec

from store.records import ApiKey, Tenant


class Principal(msgspec.Struct, frozen=True):
    """Caller of a request: a tenant and one of its keys."""

    tenant: Tenant
    key: ApiKey

    @property
    def cache_domain(self) -> str:
        """Domain within which cached prefixes are shared."""
        group = self.tenant.sharing_group
        return f"tenant:{self.tenant.id}" if group is None else f"group:{group}"

    def may_use(self, model: str) -> bool:
        """Returns whether the key's list of models allows the model. Does not check whether the
        tenant has such a model."""
        return self.key.may_use(model.removeprefix(f"{self.tenant.name}/"))
