"""Where pods run on this machine: the loopback network, or network namespaces on a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

SERIAL = os.getpid()
"""Of this test process: others on this machine have another."""


class Loopback:
    """Addresses of 127.0.0.0/8: every process in the one network of the machine."""

    def address(self, host: int) -> str:
        return f"127.{100 + SERIAL % 100}.{SERIAL // 100 % 250}.{host}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command, to be run on that host."""
        return list(command)

    def close(self) -> None:
        """Nothing was made."""


class Namespaces(Loopback):
    """A network namespace for each host, joined by a bridge that has the first address. A host's
    cable may be cut: what is sent to it is lost, and no connection is closed."""

    def __init__(self) -> None:
        """Raises PermissionError where they may not be made."""
        self._ip = shutil.which("ip", path="/usr/sbin:/usr/bin:/sbin:/bin") or ""
        self._bridge = f"lpx{SERIAL}"
        self._hosts: set[int] = set()
        try:
            self._run("link", "add", self._bridge, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            raise PermissionError("no network namespaces: they need root and iproute2") from error
        self._run("addr", "add", f"{self.address(1)}/24", "dev", self._bridge)
        self._run("link", "set", self._bridge, "up")

    def address(self, host: int) -> str:
        return f"10.{100 + SERIAL % 100}.{SERIAL // 100 % 250}.{host}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        if host not in self._hosts:
            self._add(host)
        return [self._ip, "netns", "exec", self._namespace(host), *command]

    def cut(self, host: int) -> None:
        self._run("link", "set", self._namespace(host), "down")

    def mend(self, host: int) -> None:
        self._run("link", "set", self._namespace(host), "up")

    def close(self) -> None:
        for host in self._hosts:
            self._run("netns", "del", self._namespace(host))
        self._run("link", "del", self._bridge)

    def _add(self, host: int) -> None:
        self._hosts.add(host)
        name = self._namespace(host)
        self._run("netns", "add", name)
        self._run("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._run("link", "set", name, "master", self._bridge, "up")
        self._run("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._run("-n", name, "link", "set", device, "up")

    def _namespace(self, host: int) -> str:
        """Also the name of the host's end at the bridge."""
        return f"{self._bridge}-{host}"

    def _run(self, *arguments: str) -> None:
        subprocess.run([self._ip, *arguments], check=True, capture_output=True)
