"""Warns of risky settings before a server starts."""

from __future__ import annotations

import os
import socket

from loraplex.private import may_be_replaced
from loraplex.roles.listener import is_loopback
from loraplex.settings import Settings


def warnings_of(
    settings: Settings, listener: socket.socket, management: socket.socket
) -> list[str]:
    """Returns one line for each risk, which names the setting that removes it."""
    found: list[str] = []
    if os.geteuid() == 0:
        found.append("it runs as root: start it under an account of its own, which owns data_dir")
    if may_be_replaced(settings.home):
        found.append(f"data_dir: other accounts may write to {settings.home}: chmod 700 it")
    if not is_loopback(listener):
        host = settings.host
        if settings.tls_certificate is None and not settings.trusted_proxies:
            found.append(
                f"host: {host} is served without TLS, API keys can be read on the network: set"
                " tls_certificate and tls_key, or trusted_proxies if a proxy does it"
            )
        if not settings.default_tenant_quota:
            found.append(
                f"host: {host} is public, and new tenants have no limits: set default_tenant_quota"
            )
    if not is_loopback(management):
        found.append(
            f"management_host: metrics on {settings.management_host} need no key, and what is sent"
            " there is not encrypted"
        )
    return found
