"""Which port is for callers and which for operators."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from admin.keys import keys
from admin.tenants import tenants
from loraplex.errors import BadSettings
from loraplex.roles import tls
from loraplex.roles.bootstrap import default_quota
from loraplex.roles.listener import listen, listen_for_management, serves_apart
from loraplex.roles.precautions import warnings_of
from loraplex.settings import Settings, load_settings
from store.database import EVERYTHING, Database
from store.records import TENANT_SCOPES
from tests.plane import Plane, free_port, product


def make_certificate(folder: Path, name: str = "own") -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1, signed by itself, and of its key."""
    folder.mkdir(exist_ok=True)
    files = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run(command, check=True, capture_output=True)
    return files


def gateway(folder: Path, dsn: str, certificate: Path, key: Path) -> Plane:
    """Returns `loraplex gateway --admin` with TLS on its public port."""
    return product(
        *("gateway", "--admin"),
        folder=folder,
        management_port=free_port(),
        database_url=dsn,
        key_pepper="pepper",
        tls_certificate=certificate,
        tls_key=key,
        default_tenant_quota="requests_per_minute=7,spend_per_month=1.50",
    )


async def test_operators_have_a_listener_of_their_own(dsn: str, tmp_path: Path):
    """Where others reach the public port, or TLS names it, an admin key opens nothing there but
    /metrics."""
    certificate, key_file = make_certificate(tmp_path)
    database = await Database.connect(dsn, sees=EVERYTHING)
    async with database.transaction() as connection:
        tenant = await tenants.create_tenant(connection, "acme")
        _, own = await keys.create_key(connection, b"pepper", tenant.id, TENANT_SCOPES)
        _, admin = await keys.create_key(connection, b"pepper", None)
    await database.close()
    process = gateway(tmp_path, dsn, certificate, key_file)
    url = process.url.replace("http", "https")
    await process.launch()
    as_admin = {"authorization": f"Bearer {admin}"}
    try:
        # Without a worker it never gets ready.
        await process.get("/livez")
        trusted = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(base_url=url, verify=trusted, timeout=30) as public:
            for path in ("/admin/v1/tenants", "/v1/organization/costs?start_time=0"):
                assert (await public.get(path, headers=as_admin)).status_code == 404
            expected = {"": 401, "Bearer lpx_nothing": 401, f"Bearer {own}": 404}
            for header, status in expected.items():
                answer = await public.get("/metrics", headers={"authorization": header})
                assert answer.status_code == status, answer.text
                assert "python_info" not in answer.text
            assert "python_info" in (await public.get("/metrics", headers=as_admin)).text
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{process.url}/livez")
        async with httpx.AsyncClient(base_url=f"http://{process.health}", timeout=30) as operators:
            assert "python_info" in (await operators.get("/metrics")).text
            assert (await operators.get("/admin/v1/tenants")).status_code == 401
            assert (await operators.get("/v1/models")).status_code == 404
            operators.headers.update(as_admin)
            made = await operators.post("/admin/v1/tenants", json={"name": "globex"})
            assert made.status_code == 201, made.text
            quota = (await operators.get("/admin/v1/tenants/globex/quota")).json()
            assert (quota["requests_per_minute"], quota["spend_per_month"]) == (7, "1.50")
        assert await process.end() == 0
    finally:
        await process.kill()
    told = process.log_text
    start = r"loraplex gateway \S+ serves on \S+ with TLS, management on \S+: gateway-\S+, with "
    assert len(re.findall(start, told)) == 1, told


@pytest.fixture
def sockets() -> Iterator[dict[str, socket.socket]]:
    """Bound and served by nobody."""
    with (
        listen(Settings(host="0.0.0.0", port=0)) as public,
        listen(Settings(host="::1", port=0)) as loopback,
    ):
        yield {"public": public, "loopback": loopback}


def test_what_others_reach_is_apart_and_warned_of(
    sockets: dict[str, socket.socket], tmp_path: Path
):
    public, loopback = sockets["public"], sockets["loopback"]
    assert serves_apart(public, None) and not serves_apart(loopback, None)
    assert serves_apart(loopback, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def told(*pair: socket.socket, **values: object) -> list[str]:
        settings = Settings(data_dir=tmp_path, **values)
        lines = warnings_of(settings, *pair)
        return [line for line in lines if "runs as root" not in line]

    assert told(loopback, loopback) == []
    for name in ("tls_certificate and tls_key", "default_tenant_quota"):
        assert [line for line in told(public, loopback) if name in line]
    named = {"trusted_proxies": ("10.0.0.0/8",), "default_tenant_quota": {"adapters": 1}}
    assert told(public, loopback, **named) == []
    assert "management_host" in told(loopback, public)[0]
    tmp_path.chmod(0o777)
    assert "data_dir" in told(loopback, loopback)[0]


def test_root_is_warned(sockets: dict[str, socket.socket], tmp_path: Path):
    settings = Settings(data_dir=tmp_path)
    lines = warnings_of(settings, sockets["loopback"], sockets["loopback"])
    assert bool(lines) == (os.geteuid() == 0)


def test_a_management_port_that_was_asked_for_is_that_or_refused():
    with listen_for_management(Settings()) as first, listen_for_management(Settings()) as second:
        taken = first.getsockname()[1]
        assert second.getsockname()[1] != taken
        with pytest.raises(BadSettings, match=f"port {taken} of 127.0.0.1 is taken"):
            listen_for_management(Settings(management_port=taken))


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("own.pem", "", "give tls_certificate and tls_key, or neither"),
        ("own.pem", "other.key", "other.key"),
        ("none.pem", "own.key", "none.pem"),
        ("own.key", "own.key", "own.key"),
    ],
)
def test_certificates_that_cannot_be_used_are_refused_by_name(
    certificate: str, key: str, words: str, tmp_path: Path
):
    make_certificate(tmp_path)
    make_certificate(tmp_path, "other")
    files = {"tls_certificate": certificate, "tls_key": key}
    settings = load_settings({name: tmp_path / file for name, file in files.items() if file}, {})
    with pytest.raises(BadSettings, match=words):
        tls.load_tls(settings)


async def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path):
    files = make_certificate(tmp_path)
    settings = Settings(tls_certificate=files[0], tls_key=files[1])
    context = tls.load_tls(settings)
    assert context is not None
    following = asyncio.create_task(tls.follow_files(context, settings, interval_s=0.01))
    listener = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", ssl=context
    )
    address = listener.sockets[0].getsockname()

    async def served() -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, address)

    try:
        assert await served() == files[0].read_text()
        files[1].write_text("half of it is written")
        make_certificate(tmp_path)
        async with asyncio.timeout(60):
            while await served() != files[0].read_text():
                await asyncio.sleep(0.01)
    finally:
        following.cancel()
        listener.close()


@pytest.mark.parametrize("given", ["request_per_minute=1", "adapters=-1", "spend_per_day=x"])
def test_a_default_quota_that_is_none_is_refused(given: str):
    settings = load_settings({}, {"LORAPLEX_DEFAULT_TENANT_QUOTA": given})
    with pytest.raises(BadSettings, match="default_tenant_quota"):
        default_quota(settings)
