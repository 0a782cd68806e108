"""An overlay's pods as processes of this machine: the same commands, flags, ports and settings,
secrets as files, mutual TLS. Each has an address of its own. Addresses, folders and sizes are all
that differ."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from loraplex.probe import answers_ok
from tests.k8s.namespaces import Loopback
from tests.k8s.test_manifests import command_of, environment, find, own_containers
from tests.plane import Plane
from tests.preloaded import ROOT
from tools.manifests import Object

OVERLAY = "multi-node"
COMMAND = str(Path(sys.executable).with_name("loraplex"))
KERNELS = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
"""Where they are compiled already."""
SIZES = {"LORAPLEX_DEVICE_MEMORY": "256MiB", "LORAPLEX_THREADS": "1"}
FIRST_HOST = {"admin": 10, "migrate": 10, "gateway": 20, "worker": 30}
WORKER = re.compile(r"loraplex-worker-(\d)\.loraplex-worker\.loraplex\.svc")


class Installation:
    def __init__(self, folder: Path, dsn: str, network: Loopback) -> None:
        self.folder = folder
        self.network = network
        self._containers: dict[str, Object] = {
            command_of(container)[1]: container for _, container in own_containers(OVERLAY)
        }
        secrets = {"database/url": dsn, "database-owner/url": dsn, "pepper/pepper": "pepper"}
        for name, text in secrets.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        self._certify()

    def process(self, role: str, number: int = 0, source: Path | None = None) -> Plane:
        """source: the tree of another version, to run in place of this one."""
        asked = self._containers[role]["readinessProbe"]["httpGet"]
        return Plane(
            self._at(role, number, self._command(role, number, source)),
            kind="process",
            health=f"{self.address(role, number)}:{self._port(role, asked['port'])}",
            environment=self._environment(role, number, source),
            log=self.folder / f"{role}-{number}.log",
            folder=source or ROOT,
        )

    @property
    def min_ready_s(self) -> int:
        """So long a worker has been ready when a roll-out goes on to the next."""
        return find(OVERLAY, "StatefulSet", "loraplex-worker")["spec"]["minReadySeconds"]

    def run(self, role: str, *arguments: str, source: Path | None = None, **more: str) -> str:
        """What a command prints in the first pod of that role; without one, the pod's own.
        source: as for `process`."""
        command = self._command(role, 0, source)
        if arguments:
            command = [*_program(source), *arguments]
        done = subprocess.run(
            self._at(role, 0, command),
            env=self._environment(role, 0, source) | more,
            cwd=source,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def passes(self, role: str, probe: str) -> bool:
        """Whether the first pod of that role passes the probe."""
        asked = self._containers[role][probe]["httpGet"]
        return answers_ok(f"{self.address(role)}:{self._port(role, asked['port'])}", asked["path"])

    def url(self, role: str, number: int = 0) -> str:
        return f"http://{self.address(role, number)}:{self._port(role, 'http')}"

    def address(self, role: str, number: int = 0) -> str:
        return self.network.address(self.host(role, number))

    def host(self, role: str, number: int = 0) -> int:
        """Its number in the network."""
        return FIRST_HOST[role] + number

    def _port(self, role: str, name: str) -> int:
        ports = {each["name"]: each["containerPort"] for each in self._containers[role]["ports"]}
        return ports[name]

    def _at(self, role: str, number: int, command: list[str]) -> list[str]:
        return self.network.command(self.host(role, number), command)

    def _command(self, role: str, number: int, source: Path | None) -> list[str]:
        _, *rest = command_of(self._containers[role])
        return [*_program(source), *(self._here(each, role, number) for each in rest)]

    def _environment(self, role: str, number: int, source: Path | None) -> dict[str, str]:
        given = environment(OVERLAY, self._containers[role])
        here = {name: self._here(value, role, number) for name, value in given.items()}
        here |= {name: size for name, size in SIZES.items() if name in given}
        here["PYTHONPATH"] = str(source or ROOT)
        return {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": KERNELS} | here

    def _here(self, value: str, role: str, number: int) -> str:
        """A value of the manifests on this machine."""
        value = re.sub(r"0\.0\.0\.0|127\.0\.0\.1", self.address(role, number), value)
        value = WORKER.sub(lambda found: self.address("worker", int(found[1])), value)
        value = value.replace("s3://loraplex", str(self.folder))
        value = value.replace("/etc/loraplex/tls", str(self.folder / f"{role}-tls"))
        value = value.replace("/var/lib/loraplex", str(self.folder / f"{role}-{number}"))
        return value.replace("/etc/loraplex", str(self.folder))

    def _certify(self) -> None:
        """Certificates of the names that the overlay's have, and of the workers' addresses."""
        authority = self._sign("authority", "ca", [], None)
        for role in ("gateway", "worker"):
            spec = find(OVERLAY, "Certificate", f"loraplex-{role}")["spec"]
            names = [f"DNS:{name}" for name in spec["dnsNames"]]
            if role == "worker":
                names += [f"IP:{self.address(role, number)}" for number in range(3)]
            self._sign(f"{role}-tls", "tls", names, authority)
            (self.folder / f"{role}-tls" / "ca.crt").write_bytes(authority[0].read_bytes())

    def _sign(
        self, folder: str, name: str, names: list[str], issuer: tuple[Path, Path] | None
    ) -> tuple[Path, Path]:
        (self.folder / folder).mkdir()
        files = self.folder / folder / f"{name}.crt", self.folder / folder / f"{name}.key"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
        command += ["ec_paramgen_curve:P-256", "-nodes", "-days", "1", "-subj", f"/CN={folder}"]
        command += ["-out", str(files[0]), "-keyout", str(files[1])]
        if issuer is not None:
            command += ["-CA", str(issuer[0]), "-CAkey", str(issuer[1])]
            command += ["-addext", f"subjectAltName={','.join(names)}"]
            command += ["-addext", "basicConstraints=critical,CA:FALSE"]
        subprocess.run(command, check=True, capture_output=True)
        return files


def _program(source: Path | None) -> list[str]:
    """What the images have as `loraplex`, of this tree or of another."""
    return [COMMAND] if source is None else [sys.executable, "-m", "loraplex"]
