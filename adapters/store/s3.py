"""Buckets of S3, and of servers with S3's interface. boto3 finds endpoint, region and credentials.
Torch-free."""

# botocore has no type annotations.

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.session
import certifi
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.store import S3Store

from adapters.store.buckets import RETRIES, Bucket
from adapters.store.folder import StoreUnavailable

CONFIG = Config(connect_timeout=3, read_timeout=10, s3={"addressing_style": "path"})
CREDENTIALS_TTL = timedelta(minutes=10)
"""Time for which obstore keeps the credentials that boto3 gives it. boto3 replaces credentials at
least ten minutes before they expire."""


class S3Bucket(Bucket):
    """Bucket of S3."""

    def __init__(self, name: str) -> None:
        """Raises ValueError if boto3's settings are wrong, or name no credentials."""
        session: Any = botocore.session.get_session()
        try:
            if session.get_credentials() is None:
                raise ValueError("boto3 finds no credentials")
            self._client = session.create_client("s3", config=CONFIG)
        except BotoCoreError as error:
            raise ValueError(str(error)) from error
        self._name = name
        authorities = Path(session.get_config_variable("ca_bundle") or certifi.where())
        super().__init__(
            lambda options: S3Store(
                name,
                endpoint=self._client.meta.endpoint_url,
                region=session.get_config_variable("region") or "us-east-1",
                # Every server with S3's interface supports addresses with the bucket in the path,
                # whatever its host name, and the deletion of one object at a time.
                virtual_hosted_style_request=False,
                disable_bulk_delete=True,
                credential_provider=Boto3CredentialProvider(session, ttl=CREDENTIALS_TTL),
                client_options={**options, "root_certificate": authorities.read_bytes()},
                retry_config=RETRIES,
            )
        )

    def discard_uploads(self, prefix: str, before: datetime) -> None:
        # obstore has no call that lists uploads.
        try:
            found = self._client.list_multipart_uploads(Bucket=self._name, Prefix=prefix)
            for upload in found.get("Uploads", []):
                if upload["Initiated"] < before:
                    self._client.abort_multipart_upload(
                        Bucket=self._name, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
        except (BotoCoreError, ClientError) as error:
            raise StoreUnavailable(f"the object store failed: {error}") from error
