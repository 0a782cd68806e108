"""Destinations of traces and metrics over OTLP, from OpenTelemetry's standard variables.

https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource

from loraplex.errors import BadSettings

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5.0
"""Maximum seconds for which an ending process waits until its last spans or metrics are sent."""
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
DEFAULT_ENDPOINT = "http://localhost:4318"
PROTOCOL = "http/protobuf"

Signal = Literal["traces", "metrics"]


def otlp_url(environ: Mapping[str, str], signal: Signal) -> str | None:
    """Returns the URL to which a signal (traces or metrics) is sent, or None.

    Returns None unless an endpoint is given or OTEL_<SIGNAL>_EXPORTER is `otlp`. Also returns None,
    with a warning, if the protocol is not http/protobuf: operators set these variables for all
    their pods, and telemetry must not prevent serving. Raises BadSettings for other unsupported
    values.
    """
    name = signal.upper()
    own = environ.get(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    base = environ.get(ENDPOINT)
    default = "otlp" if own or base else "none"
    exporter = choice(environ, f"OTEL_{name}_EXPORTER", default, "otlp none")
    if exporter == "none" or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL"
    variable = protocol if environ.get(protocol) else "OTEL_EXPORTER_OTLP_PROTOCOL"
    if (found := environ.get(variable) or PROTOCOL) != PROTOCOL:
        log.warning(
            *("%s are not exported: %s is %r; supported: %s", signal, variable, found),
            PROTOCOL,
        )
        return None
    url = own or f"{(base or DEFAULT_ENDPOINT).removesuffix('/')}/v1/{signal}"
    if urlsplit(url).scheme not in ("http", "https"):
        raise BadSettings(f"{ENDPOINT} takes a URL of http or https")
    return url


def without_secrets(url: str) -> str:
    """Returns the URL without its user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def resource(environ: Mapping[str, str], role: str, instance_id: str) -> Resource:
    """Returns the OpenTelemetry resource that identifies a process. OTEL_SERVICE_NAME overrides the
    name that is derived from the role."""
    name = environ.get("OTEL_SERVICE_NAME") or f"loraplex-{role}"
    return Resource.create({SERVICE_NAME: name, SERVICE_INSTANCE_ID: instance_id})


def choice(environ: Mapping[str, str], name: str, default: str, allowed: str) -> str:
    """Returns a variable's value. Raises BadSettings unless the value is one of `allowed`, which
    are separated by spaces."""
    value = environ.get(name) or default
    if value not in allowed.split():
        raise BadSettings(f"{name} takes {allowed.replace(' ', ', ')}, not {value!r}")
    return value
