"""Harness of all servers of the tests: one way to start, await, end and kill a server, to read its
log and to make clients for it, wherever it runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import httpx

from gateway.requests.services import GatewayRefusals
from loraplex.death import die_with_parent
from loraplex.probe import answers_ok
from tests.preloaded import ROOT, Forked, preloaded
from web.http_protocol import HEAD_S, KEEP_ALIVE_S
from web.server import Server, make_config

Kind = Literal["in_process", "forked", "process"]
START_TIMEOUT_S = 180.0
PORTS = range(10_000, 32_000)
"""Below those that the kernel gives to clients, which could get one before its server binds it."""
_numbers = itertools.count(200 * os.getpid())
"""Counter for the choice of ports. Test processes of the same time begin at different ports."""


def free_port() -> int:
    """Returns a port that nothing uses. Each call returns another one."""
    for number in _numbers:
        port = PORTS[number % len(PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")


def variables(**settings: object) -> dict[str, str]:
    """Returns the LORAPLEX_* variables of settings that are named without the prefix."""
    return {f"LORAPLEX_{name.upper()}": str(value) for name, value in settings.items()}


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def lifespan(receive: Any, send: Any) -> None:
    """Answers for an application that has nothing to do when its server starts and ends."""
    for part in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{part}.complete"})


class Plane:
    """Server that a test may start, end, hold up, kill and start again at the same address."""

    def __init__(
        self,
        runs: Any,
        *,
        kind: Kind = "in_process",
        name: str = "",
        port: int | None = None,
        health: str = "",
        environment: Mapping[str, str] = os.environ,
        log: Path | None = None,
        folder: Path = ROOT,
        send_buffer: int | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        head_s: float = HEAD_S,
        **bounds: Any,
    ) -> None:
        """kind: "in_process" serves the ASGI application `runs` in the running loop, as the gateway
        role does; "forked" runs the module runs[0] with the arguments runs[1:] in a process forked
        from one that has imported the product; "process" runs the command `runs`.

        Of processes: `health` is the HOST:PORT or `unix:PATH` of /readyz, by default the port's.
        Each start adds to `log`; without one, the process writes where the tests do. `folder` is
        where it starts. Of applications: `send_buffer` is the size of each connection's, `bounds`
        are those of `make_config`."""
        self.kind: Kind = kind
        self.name = name
        self.port = port or 0
        self.health = health or f"127.0.0.1:{port}"
        self.log = log
        self.runs = runs
        self.environment = environment
        self._folder = folder
        self._bounds = {"drain_s": 5, "metrics": GatewayRefusals(), **bounds}
        self._timeouts = {"head_s": head_s, "timeout_keep_alive": keep_alive_s}
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._send_buffer = send_buffer
        self.server: Server
        """Server of an application that runs in this process."""
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def new_client(self, key: str = "", path: str = "", timeout_s: float = 60) -> httpx.AsyncClient:
        """Returns a client that bears the key."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url + path, headers=headers, timeout=timeout_s)

    @property
    def log_text(self) -> str:
        return self.log.read_text() if self.log and self.log.exists() else ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) << 10

    @property
    def is_running(self) -> bool:
        """Whether it has begun and not ended; it may be held up."""
        if self.kind == "in_process":
            return self._task is not None and not self._task.done()
        return self._process is not None and self._status() is None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.kind == "in_process":
            await self.end()
        else:
            await self.kill()

    async def start(self) -> None:
        """Returns when it is ready. Kills it if it does not become ready."""
        await self.launch()
        try:
            await self.wait_ready()
        except BaseException:
            await self.kill()
            raise

    async def launch(self) -> None:
        assert not self.is_running
        if self.log:
            # A test may read it before the process has opened it.
            self.log.touch()
        if self.kind == "in_process":
            self._serve()
        elif self.kind == "forked":
            module, *arguments = self.runs
            outputs = [self.log] * 2 if self.log else []
            self._process = preloaded().start(
                *(module, *arguments),
                environment=self.environment,
                outputs=outputs,
                folder=self._folder,
            )
        else:
            with contextlib.ExitStack() as stack:
                log = stack.enter_context(self.log.open("ab")) if self.log else None
                self._process = subprocess.Popen(
                    self.runs,
                    cwd=self._folder,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                    preexec_fn=die_with_parent(signal.SIGKILL),
                )

    def _serve(self) -> None:
        # Without its number asyncio leaves Nagle's algorithm on, which costs 40 ms a request.
        listener = socket.socket(proto=socket.IPPROTO_TCP)
        if self._send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
        # Connections of a killed predecessor may still end at its port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        config = make_config(self.runs, **self._bounds)
        for name, seconds in self._timeouts.items():
            setattr(config, name, seconds)
        self.server = Server(config)
        self._task = asyncio.create_task(self._run(listener))

    async def _run(self, listener: socket.socket) -> None:
        with listener:
            await self.server.serve(sockets=[listener])

    async def wait_ready(self) -> None:
        latest = time.monotonic() + START_TIMEOUT_S
        while not await self._is_ready():
            assert self.is_running, f"it ended before it was ready: {self.log_text[-4000:]}"
            assert time.monotonic() < latest, f"it is not ready in time: {self.log_text[-4000:]}"
            await asyncio.sleep(0.01 if self.kind == "in_process" else 0.05)

    async def get(self, path: str) -> httpx.Response:
        """Returns the answer of the address that has /readyz, once the process listens."""
        async with httpx.AsyncClient(base_url=f"http://{self.health}", timeout=60) as client:
            while True:
                assert self.is_running, self.log_text[-4000:]
                try:
                    return await client.get(path)
                except httpx.TransportError:
                    await asyncio.sleep(0.05)

    @property
    def is_serving(self) -> bool:
        """Whether an application is served by now."""
        return self._task is not None and self.server.started

    async def _is_ready(self) -> bool:
        if self.kind == "in_process":
            return self.is_serving
        return await asyncio.to_thread(answers_ok, self.health, "/readyz")

    async def end(self) -> int:
        """Ends it as a service manager does, with SIGTERM. Returns its exit status."""
        if self.kind == "in_process":
            self.server.should_exit = True
        elif self.is_running:
            self.send(signal.SIGTERM)
        return await self.wait()

    async def stop(self) -> None:
        assert await self.end() in (0, -signal.SIGTERM), self.log_text[-4000:]

    async def kill(self) -> None:
        """Ends it at once, if it is running."""
        if not self.is_running:
            return
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        else:
            self.send(signal.SIGKILL)
            await self.wait()

    def pause(self) -> None:
        """Lets it live and do nothing, until `resume`."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def wait(self) -> int:
        if self._task is not None:
            await self._task
            return 0
        while (status := self._status()) is None:
            await asyncio.sleep(0.01)
        return status

    def _status(self) -> int | None:
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        assert self._process is not None
        return self._process.returncode


def product(
    *command: str,
    folder: Path,
    name: str = "",
    module: str = "loraplex",
    management_port: int | None = None,
    **settings: object,
) -> Plane:
    """Returns `loraplex COMMAND` with a data folder, a log and a free port. module: whose command
    it is. management_port: where it is asked for /readyz, if it is not the public port."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    own = variables(data_dir=folder / "data", port=port, **settings)
    if management_port is not None:
        own |= variables(management_port=management_port)
    return Plane(
        (module, *command),
        kind="forked",
        name=name,
        port=port,
        health=f"127.0.0.1:{management_port}" if management_port else "",
        environment=os.environ | own,
        log=folder / "log",
    )


def python(*command: str) -> Sequence[str]:
    """Returns the command that runs a module of this tree in a new process."""
    return [sys.executable, "-m", *command]
