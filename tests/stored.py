"""What lies in a store that is a folder."""

from __future__ import annotations

from adapters.store.folder import Kind, Store


def kept(store: Store, kind: Kind) -> list[str]:
    return sorted(folder.name for folder in (store.incoming.parent / kind).iterdir())
