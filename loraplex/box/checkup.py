"""Checks this machine for problems that keep loraplex from running well. Changes nothing."""

from __future__ import annotations

import asyncio
import importlib
import os
import platform
import resource
import shutil
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx

from admin.migrate import check_schema
from loraplex.api import connect
from loraplex.box.postgres import EmbeddedPostgres, find_binaries
from loraplex.certificates import expiry_of
from loraplex.errors import ApiFailure, LoraplexError, reason_of
from loraplex.private import check_owner, may_be_replaced
from loraplex.roles.tls import load_tls
from loraplex.settings import Settings
from ops.build import COMPILED, BuildError, find_compiler, find_library, find_shipped
from ops.kernel_library import load
from ops.processor import Processor, describe_unpacking
from store.database import Database
from store.errors import ApiError

MIN_DESCRIPTORS = 4096
MIN_PYTHON = (3, 11)
CERTIFICATE_DAYS = 14
MAX_SKEW_S = 5.0
"""Maximum seconds by which this machine's clock may differ from the database's or a server's.
Budgets, keys and traces depend on the time."""
LOW_DISK = 2 << 30
"""Bytes above `min_free_disk`. With less free disk space than this sum, a warning is shown."""
TIMEOUT_S = 5.0
DAY_S = 86_400

State = Literal["ok", "warning", "failed", "skipped"]


class Finding(NamedTuple):
    """Result of one check. `advice` says what to do, and is empty if there is nothing to do."""

    check: str
    state: State
    found: str
    advice: str = ""


def checkup(settings: Settings) -> Iterator[Finding]:
    """Runs every check and yields its findings. A check that itself fails yields a finding too."""
    for name, check in CHECKS.items():
        try:
            yield from (Finding(name, *finding) for finding in check(settings))
        except (LoraplexError, ApiError) as error:
            yield Finding(name, "failed", str(error))
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            yield Finding(name, "failed", place + reason_of(error))
        except Exception as error:
            # The server that answers may not be loraplex, so its answer may have any form.
            found = f"the check failed: {error}"
            yield Finding(name, "failed", found, "check that the settings name a loraplex server")


Findings = Iterator[tuple[State, str, str]]


def _versions(_: Settings) -> Findings:
    parts = {name: _version(name) for name in ("loraplex", "torch", "asyncpg", "litestar")}
    text = f"Python {platform.python_version()}, " + ", ".join(
        f"{name} {number or 'missing'}" for name, number in parts.items()
    )
    # Gateways and admin planes do not have torch installed.
    missing = [name for name, number in parts.items() if number is None and name != "torch"]
    if sys.version_info < MIN_PYTHON:
        yield "failed", text, f"install Python {'.'.join(map(str, MIN_PYTHON))} or later"
    elif missing:
        yield "failed", text, f"pip install loraplex again: {', '.join(missing)} is missing"
    else:
        yield "ok", text, ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _machine(settings: Settings) -> Findings:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    wanted = settings.device_memory or settings.memory or 0
    text = f"{platform.machine()}, {cores} cores, {_gib(total)} of memory"
    if settings.device != "cuda" and wanted + settings.host_adapter_memory > total:
        advice = "lower memory (or device_memory) or host_adapter_memory"
        yield "failed", f"{text}; {_gib(wanted)} asked for", advice
    else:
        yield "ok", text, ""
    if settings.device == "cuda" and not Path("/dev/nvidiactl").exists():
        yield (
            "failed",
            "device is cuda, and there is no NVIDIA driver",
            "install it, or set device to cpu",
        )
    if os.geteuid() == 0:
        yield "warning", "this runs as root", "start it under an account of its own"


def _descriptors(_: Settings) -> Findings:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_DESCRIPTORS:
        advice = f"raise it to 65536 (ulimit -Hn, LimitNOFILE): {MIN_DESCRIPTORS} at least"
        yield "warning", f"{hard} open files at most", advice
    else:
        yield (
            "ok",
            "no limit" if hard == resource.RLIM_INFINITY else f"{hard} open files at most",
            "",
        )


def _compiler(settings: Settings) -> Findings:
    if settings.device == "cuda" or settings.ops in ("reference", "cuda"):
        yield "skipped", "not needed for these settings", ""
        return
    if _version("torch") is None:
        yield "skipped", "no worker is installed here", ""
        return
    runnable = Processor.here().variants()
    variant = settings.kernel_variant or runnable[0]
    if variant not in runnable:
        advice = f"set kernel_variant to one of {', '.join(runnable)}, or unset it"
        yield "failed", f"this processor cannot run the kernels of {variant}", advice
        return
    if COMPILED.is_dir() or variant == "amx":
        # torch is imported first, because the name of the kernel library depends on the OpenMP
        # runtime that torch loads.
        importlib.import_module("torch")
    try:
        if variant == "amx" and find_library(variant) is not None:
            yield _self_check(variant, runnable[1])
            return
        if find_shipped(variant) is not None:
            yield "ok", f"not needed: kernels for {variant} are shipped", ""
            return
        yield "ok", f"{find_compiler()} compiles kernels for {variant}", ""
    except BuildError as error:
        yield "failed", str(error), "install g++, set CXX, or set ops to reference (slow)"


def _self_check(variant: str, replacement: str) -> tuple[State, str, str]:
    try:
        load(variant)
    except BuildError as error:
        advice = f"let workers use the instructions, or set kernel_variant to {replacement}"
        return "warning", f"{error}; kernels for {replacement} are used", advice
    return "ok", f"kernels for {variant} give the bits that they are specified to give", ""


def _quantised_weights(settings: Settings) -> Findings:
    if settings.device != "cuda" and settings.ops not in ("reference", "cuda"):
        variant = settings.kernel_variant or Processor.here().variants()[0]
        yield "ok", f"{variant}: {describe_unpacking(variant)}", ""


def _data_directory(settings: Settings) -> Findings:
    home = settings.home
    if not home.exists():
        yield "ok", f"{home} will be created", ""
        return
    check_owner(home)
    if not os.access(home, os.W_OK | os.X_OK):
        yield "failed", f"{home} cannot be written", "make it writable, or set another data_dir"
    elif may_be_replaced(home):
        yield "warning", f"other accounts may write to {home}", f"chmod 700 {home}"
    else:
        yield "ok", str(home), ""


def _disk(settings: Settings) -> Findings:
    for place in dict.fromkeys(_existing(each) for each in _places(settings)):
        free = shutil.disk_usage(place).free
        text = f"{_gib(free)} free at {place}"
        if free < settings.min_free_disk:
            yield "failed", text, f"make room: uploads leave {_gib(settings.min_free_disk)} free"
        elif free < settings.min_free_disk + LOW_DISK:
            yield "warning", text, "make room"
        else:
            yield "ok", text, ""


def _places(settings: Settings) -> list[Path]:
    store = settings.store_location
    return [settings.home, *([] if "://" in store else [Path(store)]), Path(tempfile.gettempdir())]


def _existing(path: Path) -> Path:
    """Returns the path, or its nearest parent that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _store(settings: Settings) -> Findings:
    location = settings.store_location
    if "://" in location:
        settings.open_store().exists("models", "0" * 64)
        yield "ok", f"{location} answers", ""
        return
    place = _existing(Path(location))
    if os.access(place, os.W_OK | os.X_OK):
        yield "ok", location, ""
    else:
        yield "failed", f"{place} cannot be written", "make it writable, or set another store"


def _database(settings: Settings) -> Findings:
    dsn = settings.database_url
    if dsn is None:
        embedded = EmbeddedPostgres(settings.home, user=settings.pg_user)
        if not (embedded.home / "password").exists():
            yield "ok", f"embedded, will be created; programs in {find_binaries()}", ""
            return
        if not any(embedded.socket_dir.glob(".s.PGSQL.*")):
            yield "skipped", f"embedded in {embedded.home}, not running", ""
            return
        dsn = embedded.dsn()
    number, skew_s = asyncio.run(_ask(dsn))
    yield "ok", f"PostgreSQL {number}, with this version's schema", ""
    yield _skew(skew_s, "the database's")


async def _ask(dsn: str) -> tuple[str, float]:
    """Returns the database server's version, and the seconds by which its clock is ahead of this
    machine's. Raises ApiError."""
    database = await Database.connect(dsn, max_size=1, application_name="loraplex-doctor")
    try:
        await check_schema(database)
        async with database.acquire() as connection:
            before = time.time()
            row = await connection.fetchrow(
                "SELECT extract(epoch FROM clock_timestamp())::float8 AS now,"
                " current_setting('server_version') AS number"
            )
            after = time.time()
    finally:
        await database.close()
    assert row is not None
    return str(row["number"]), float(row["now"]) - (before + after) / 2


def _skew(skew_s: float, whose: str) -> tuple[State, str, str]:
    text = f"{whose} clock differs by {abs(skew_s):.1f} s"
    if abs(skew_s) > MAX_SKEW_S:
        return "failed", text, "let NTP set both clocks"
    return "ok", text, ""


def _certificates(settings: Settings) -> Findings:
    if not settings.certificates:
        yield "skipped", "none in the settings", ""
        return
    load_tls(settings)
    if (tls := settings.security.tls) is not None:
        try:
            tls.server_context()
        except ssl.SSLError as error:
            advice = "give transport_key the key of transport_certificate"
            yield "failed", f"transport_certificate, transport_key: {reason_of(error)}", advice
    for name, path in settings.certificates.items():
        try:
            days = (expiry_of(path) - time.time()) / DAY_S
        except ValueError as error:
            yield "failed", f"{name}: {error}", "give a PEM file"
            continue
        text = f"{name} expires in {days:.0f} days" if days > 0 else f"{name} has expired"
        if days <= 0:
            yield "failed", text, "renew it"
        else:
            yield ("warning" if days < CERTIFICATE_DAYS else "ok"), text, ""


def _ports(settings: Settings) -> Findings:
    """Checks whether the ports are free, or whether a loraplex server listens on them."""
    for host, port in (
        (settings.host, settings.port),
        (settings.management_host, settings.management_port or 0),
    ):
        if port == 0:
            continue
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                urls = (f"{scheme}://{host}:{port}/livez" for scheme in ("http", "https"))
                answers = [answer for url in urls if (answer := _get(url)) is not None]
                if not any(answer.status_code == 200 for answer in answers):
                    yield "failed", f"{host}:{port}: {error.strerror}", "give another port"
                    continue
                yield "ok", f"{host}:{port} is served by loraplex", ""
            else:
                yield "ok", f"{host}:{port} is free", ""


def _server(settings: Settings) -> Findings:
    try:
        api = connect(settings)
    except ApiFailure as failure:
        yield "skipped", str(failure), ""
        return
    with api:
        answer = _get(f"{api.url}/readyz")
        if answer is None:
            yield "failed", f"no answer from {api.url}", "look at its log, or start it"
            return
        if answer.status_code != 200:
            text = f"{api.url} is not ready: {answer.text[:200]}"
            yield "failed", text, "see docs/operate/alerts.md"
        else:
            yield "ok", f"{api.url} is ready", ""
        told = _get(f"{api.url}/version")
        number = None if told is None else told.json().get("version")
        own = _version("loraplex")
        if number is not None and own is not None and number != own:
            yield "warning", f"the server is {number}, this command {own}", "upgrade one of them"
        if date := answer.headers.get("date"):
            skew_s = parsedate_to_datetime(date).timestamp() + 0.5 - time.time()
            yield _skew(skew_s, "the server's")
        yield from _workers(api.all("/admin/v1/workers", cursor="id"))


def _workers(workers: list[dict[str, Any]]) -> Findings:
    if not workers:
        yield "warning", "no worker is registered", "start `loraplex worker --advertise ADDRESS`"
    for worker in workers:
        text = f"worker {worker['id']} is {worker['state']}"
        match worker["state"]:
            case "ready":
                yield "ok", text, ""
            case "lost":
                yield "failed", text, "look at its log; it leaves the list after half a minute"
            case "draining":
                yield "warning", text, f"loraplex workers undrain {worker['id']}"
            case _:
                reason = worker.get("reason")
                text = f"{text}: {reason}" if reason else text
                section = "Adding, draining and removing workers"
                yield "failed", text, f"see docs/operate/operations.md, '{section}'"


def _get(url: str) -> httpx.Response | None:
    """Returns the response to a GET request, or None after a failure. Does not verify certificates,
    because nothing secret is sent."""
    try:
        return httpx.get(url, timeout=TIMEOUT_S, verify=False)
    except httpx.HTTPError:
        return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


CHECKS: dict[str, Callable[[Settings], Findings]] = {
    "versions": _versions,
    "machine": _machine,
    "descriptors": _descriptors,
    "compiler": _compiler,
    "quantised weights": _quantised_weights,
    "data directory": _data_directory,
    "disk": _disk,
    "store": _store,
    "certificates": _certificates,
    "ports": _ports,
    "database": _database,
    "server": _server,
}
