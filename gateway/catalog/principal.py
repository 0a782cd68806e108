"""The authenticated caller of a request."""

from __future__ import annotations

import msgspec

from admin.records import ApiKey, Tenant


class Principal(msgspec.Struct, frozen=True):
    """The caller of a request: a tenant and one of its keys."""

    tenant: Tenant
    key: ApiKey

    @property
    def cache_domain(self) -> str:
        """Cached prefixes are shared within a domain and nowhere else."""
        group = self.tenant.sharing_group
        return f"tenant:{self.tenant.id}" if group is None else f"group:{group}"

    def may_use(self, model: str) -> bool:
        """Whether the key's list of models allows it. The tenant may lack the model all the
        same."""
        return self.key.may_use(model.removeprefix(f"{self.tenant.name}/"))
