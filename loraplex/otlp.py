"""Where traces and metrics go over OTLP, by OpenTelemetry's standard variables.

https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource

from loraplex.errors import BadSettings

SEND_TIMEOUT_S = 5.0
"""How long a process that ends waits until its last spans or figures are sent."""
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
DEFAULT_ENDPOINT = "http://localhost:4318"

Signal = Literal["traces", "metrics"]


def otlp_url(environ: Mapping[str, str], signal: Signal) -> str | None:
    """None unless an endpoint is given or OTEL_<SIGNAL>_EXPORTER is `otlp`. Raises BadSettings for
    what is not supported."""
    name = signal.upper()
    own = environ.get(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    base = environ.get(ENDPOINT)
    default = "otlp" if own or base else "none"
    exporter = choice(environ, f"OTEL_{name}_EXPORTER", default, "otlp none")
    if exporter == "none" or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    for variable in (f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        choice(environ, variable, "http/protobuf", "http/protobuf")
    url = own or f"{(base or DEFAULT_ENDPOINT).removesuffix('/')}/v1/{signal}"
    if urlsplit(url).scheme not in ("http", "https"):
        raise BadSettings(f"{ENDPOINT} takes a URL of http or https")
    return url


def without_secrets(url: str) -> str:
    """The URL without its user, its password and its query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def resource(environ: Mapping[str, str], role: str, instance_id: str) -> Resource:
    """What names a process; its role names the service unless OTEL_SERVICE_NAME does."""
    name = environ.get("OTEL_SERVICE_NAME") or f"loraplex-{role}"
    return Resource.create({SERVICE_NAME: name, SERVICE_INSTANCE_ID: instance_id})


def choice(environ: Mapping[str, str], name: str, default: str, allowed: str) -> str:
    """allowed: the values, with spaces between them."""
    value = environ.get(name) or default
    if value not in allowed.split():
        raise BadSettings(f"{name} takes {allowed.replace(' ', ', ')}, not {value!r}")
    return value
