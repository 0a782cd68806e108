"""The manifests' containers as processes of this machine, from an empty database to a first answer
over mutual TLS: the same commands, flags and settings; folders, ports, sizes and the worker's
address are the test's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from loraplex.probe import answers_ok
from tests.doubles import make_model
from tests.gateway.live import eventually
from tests.k8s.render import Object
from tests.k8s.test_manifests import command_of, environment, find, own_containers
from tests.postgres import fresh_database
from tests.server_process import ServerProcess
from tests.stack import free_port

OVERLAY = "multi-node"
COMMAND = str(Path(sys.executable).with_name("loraplex"))
KERNELS = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
"""Where they are compiled already."""
PORTS = ("http", "management", "health", "transport")
SIZES = {"LORAPLEX_DEVICE_MEMORY": "256MiB", "LORAPLEX_THREADS": "1"}


class Installation:
    """One pod of each role, as far as a process is one."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        self.containers: dict[str, Object] = {
            command_of(container)[1]: container for _, container in own_containers(OVERLAY)
        }
        self.ports = {role: {name: free_port() for name in PORTS} for role in self.containers}
        for name, text in {
            **dict.fromkeys(("database/url", "database-owner/url"), dsn),
            "pepper/pepper": "pepper",
        }.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        self._certify()

    def command(self, role: str) -> list[str]:
        _, *rest = command_of(self.containers[role])
        return [COMMAND, *(self._here(role, each) for each in rest)]

    def environment(self, role: str) -> dict[str, str]:
        given = environment(OVERLAY, self.containers[role])
        here = {name: self._here(role, value) for name, value in given.items()}
        return (
            {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": KERNELS}
            | here
            | {name: SIZES[name] for name in SIZES.keys() & given.keys()}
        )

    def process(self, role: str) -> ServerProcess:
        probe = self.containers[role]["readinessProbe"]["httpGet"]
        return ServerProcess(
            self.command(role),
            health=f"127.0.0.1:{self.ports[role][probe['port']]}",
            environment=self.environment(role),
            log=self.folder / f"{role}.log",
        )

    def run(self, role: str, *arguments: str, **more: str) -> str:
        """What a command prints in the container of that role."""
        command = [COMMAND, *arguments] if arguments else self.command(role)
        done = subprocess.run(
            command, env=self.environment(role) | more, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def probe(self, role: str, name: str) -> bool:
        asked = self.containers[role][name]["httpGet"]
        return answers_ok(f"127.0.0.1:{self.ports[role][asked['port']]}", asked["path"])

    def _here(self, role: str, value: str) -> str:
        """A value of the manifests on this machine."""
        container = self.containers[role]
        if value.startswith("tcp://loraplex-worker-0."):
            return f"tcp://127.0.0.1:{self.ports['worker']['transport']}"
        for port in container.get("ports", ()):
            number = self.ports[role][port["name"]]
            if value == str(port["containerPort"]):
                return str(number)
            value = value.replace(f"0.0.0.0:{port['containerPort']}", f"127.0.0.1:{number}")
            value = value.replace(f"127.0.0.1:{port['containerPort']}", f"127.0.0.1:{number}")
        value = value.replace("0.0.0.0", "127.0.0.1").replace("s3://loraplex", str(self.folder))
        value = value.replace("/etc/loraplex/tls", str(self.folder / f"{role}-tls"))
        return value.replace("/etc/loraplex", str(self.folder)).replace(
            "/var/lib/loraplex", str(self.folder / role)
        )

    def _certify(self) -> None:
        """Certificates of the names that the overlay's have; the worker's address beside them."""
        authority = self._sign("authority", "ca", [], None)
        for role in ("gateway", "worker"):
            spec = find(OVERLAY, "Certificate", f"loraplex-{role}")["spec"]
            names = [f"DNS:{name}" for name in spec["dnsNames"]]
            names += ["IP:127.0.0.1"] if role == "worker" else []
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


@pytest.fixture
async def processes() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def test_from_nothing_to_a_first_answer(folder: Path, processes: AsyncExitStack) -> None:
    dsn = processes.enter_context(fresh_database(migrated=False))
    pods = Installation(folder, dsn)
    assert "0001_pre_catalog.sql" in await asyncio.to_thread(pods.run, "migrate")
    admin_key = await asyncio.to_thread(pods.run, "admin", "bootstrap")
    running = {role: pods.process(role) for role in ("worker", "gateway", "admin")}
    for process in running.values():
        processes.push_async_callback(process.kill)
        await process.launch()
    for role in running:
        for probe in ("startupProbe", "livenessProbe"):
            await eventually(lambda r=role, p=probe: pods.probe(r, p), 60)
    for role in running:
        await eventually(lambda r=role: pods.probe(r, "readinessProbe"), 60)
    model = make_model(folder / "model", "llama", max_position_embeddings=512)
    as_admin = {"LORAPLEX_KEY": admin_key}
    await asyncio.to_thread(pods.run, "admin", "model", "add", f"tiny={model}", **as_admin)
    await asyncio.to_thread(pods.run, "admin", "tenant", "create", "acme", **as_admin)
    key = await asyncio.to_thread(
        pods.run, "admin", "key", "create", "--tenant", "acme", **as_admin
    )
    url = f"http://127.0.0.1:{pods.ports['gateway']['http']}/v1/completions"
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}

    async def is_answered() -> bool:
        """Until the worker has the model, it is 503."""
        answer = await client.post(url, json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code in (200, 503), answer.text
        return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0

    async with httpx.AsyncClient(timeout=60) as client:
        await eventually(is_answered, 60)
    # Nothing runs, so no drain takes its time.
    for role in ("gateway", "worker", "admin"):
        assert await running[role].end() == 0, running[role].log
