"""Object stores in processes of their own, on this machine, each with the empty bucket `BUCKET`.

moto's server stands for Google Cloud Storage too, whose XML interface obstore speaks and which is
S3's; emulators of Google's JSON interface do not know it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from email.utils import formatdate
from pathlib import Path

import boto3
import httpx
import pytest

from tests.plane import free_port

BUCKET = "bucket"
AZURITE = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Key that azurite publishes for its account."""


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment in which the store finds it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], url):
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def google_server() -> Iterator[dict[str, str]]:
    """The environment in which the store finds it."""
    with s3_server() as environment:
        yield {
            "GOOGLE_BASE_URL": environment["AWS_ENDPOINT_URL"],
            "GOOGLE_BEARER_TOKEN": "test",
        }


@contextmanager
def azure_server() -> Iterator[dict[str, str]]:
    """The environment in which the store finds it. Skips the test if azurite is not installed."""
    if not AZURITE.exists():
        pytest.skip("azurite is not installed: make .venv/azurite.stamp")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    options += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with _running([str(AZURITE), *options], url):
        date = formatdate(usegmt=True)
        headers = {"x-ms-date": date, "x-ms-version": "2021-08-06", "content-length": "0"}
        signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
        signed += f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
        mac = hmac.digest(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256)
        headers["authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}"
        made = httpx.put(f"{url}/{ACCOUNT}/{BUCKET}?restype=container", headers=headers)
        assert made.status_code == 201, made.text
        yield {
            "AZURE_STORAGE_ENDPOINT": f"{url}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        }


SERVERS: dict[str, Callable[[], AbstractContextManager[dict[str, str]]]] = {
    "s3": s3_server,
    "gs": google_server,
    "az": azure_server,
}
"""Servers by the scheme of their buckets' locations."""


@contextmanager
def _running(command: list[str], url: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline, f"no answer of {command}"
            try:
                httpx.get(url)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()
