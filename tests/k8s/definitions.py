"""Schemas of the custom resources in `k8s/`: the fields that we use, as their projects document
them, and no others.

They are our own reading of the references named below, not copies. `published` reads the projects'
own CustomResourceDefinitions, which are not in this repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+(h|m|s))+$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def _object(*required: str, **fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


SELECTOR = _object(
    matchLabels=LABELS,
    matchExpressions=_list(
        _object(
            *("key", "operator"),
            key=TEXT,
            operator=_one_of("In", "NotIn", "Exists", "DoesNotExist"),
            values=_list(TEXT),
        )
    ),
)
POLICY = _object(
    *("type", "value", "periodSeconds"),
    type=_one_of("Pods", "Percent"),
    value=COUNT,
    periodSeconds=COUNT,
)
RULES = _object(stabilizationWindowSeconds=COUNT, policies=_list(POLICY))

SPECS: dict[tuple[str, str], Schema] = {
    # cert-manager.io/docs/reference/api-docs
    ("cert-manager.io/v1", "Issuer"): {
        "oneOf": [
            _object("selfSigned", selfSigned=_object()),
            _object("ca", ca=_object("secretName", secretName=TEXT)),
        ]
    },
    ("cert-manager.io/v1", "Certificate"): _object(
        *("secretName", "issuerRef"),
        secretName=TEXT,
        isCA={"type": "boolean"},
        commonName={"type": "string", "maxLength": 64},
        duration=DURATION,
        renewBefore=DURATION,
        privateKey=_object(
            algorithm=_one_of("RSA", "ECDSA", "Ed25519"),
            size=COUNT,
            rotationPolicy=_one_of("Never", "Always"),
        ),
        usages=_list(_one_of("client auth", "server auth", "digital signature", "cert sign")),
        dnsNames=_list(TEXT),
        issuerRef=_object("name", name=TEXT, kind=_one_of("Issuer", "ClusterIssuer")),
    ),
    # keda.sh/docs/latest/reference/scaledobject-spec
    ("keda.sh/v1alpha1", "ScaledObject"): _object(
        *("scaleTargetRef", "triggers"),
        scaleTargetRef=_object("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        cooldownPeriod=COUNT,
        fallback=_object(
            *("failureThreshold", "replicas"),
            failureThreshold=COUNT,
            replicas=COUNT,
            behavior=_one_of("static", "currentReplicas", "currentReplicasIfHigher"),
        ),
        advanced=_object(
            horizontalPodAutoscalerConfig=_object(behavior=_object(scaleUp=RULES, scaleDown=RULES))
        ),
        triggers=_list(
            _object(
                *("type", "metadata"),
                type=_one_of("prometheus"),
                metricType=_one_of("AverageValue", "Value"),
                metadata=_object(
                    *("serverAddress", "query", "threshold"),
                    serverAddress=TEXT,
                    query=TEXT,
                    threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
                    ignoreNullValues=_one_of("true", "false"),
                ),
            )
        ),
    ),
    # prometheus-operator.dev/docs/api-reference/api
    ("monitoring.coreos.com/v1", "PodMonitor"): _object(
        *("selector", "podMetricsEndpoints"),
        selector=SELECTOR,
        podMetricsEndpoints=_list(_object(port=TEXT, path=TEXT, interval=DURATION)),
    ),
    # gateway-api-inference-extension.sigs.k8s.io/reference/spec
    ("inference.networking.k8s.io/v1", "InferencePool"): _object(
        *("selector", "targetPorts", "endpointPickerRef"),
        selector=_object("matchLabels", matchLabels=LABELS),
        targetPorts=_list(_object("number", number=PORT)),
        endpointPickerRef=_object(
            *("name", "port"),
            name=TEXT,
            port=_object("number", number=PORT),
            failureMode=_one_of("FailOpen", "FailClose"),
        ),
    ),
    # gateway-api.sigs.k8s.io/reference/spec
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _object(
        parentRefs=_list(_object("name", name=TEXT)),
        rules=_list(
            _object(
                matches=_list(
                    _object(
                        path=_object(
                            type=_one_of("Exact", "PathPrefix"),
                            value={"type": "string", "pattern": "^/"},
                        )
                    )
                ),
                backendRefs=_list(_object("name", group=TEXT, kind=TEXT, name=TEXT)),
            )
        ),
    ),
}
"""By apiVersion and kind: the schema of `spec`."""


def published(folder: Path) -> dict[tuple[str, str], Schema]:
    """By apiVersion and kind: the schema of `spec` in the CustomResourceDefinitions of a folder's
    YAML files. A field that it does not name is refused, which a cluster would leave out silently.
    Rules in CEL are not read."""
    found: dict[tuple[str, str], Schema] = {}
    for file in sorted(folder.glob("*.y*ml")):
        for read in yaml.safe_load_all(file.read_text()):
            # `kubectl get crd -o yaml` makes one list.
            for each in read.get("items", [read]):
                if each["kind"] != "CustomResourceDefinition":
                    continue
                spec = each["spec"]
                for version in spec["versions"]:
                    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
                    name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    found[name] = _strict(schema)
    return found


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _strict(each) for name, each in schema.items()}
    if "properties" in schema and schema.get("type") == "object":
        is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
        made.setdefault("additionalProperties", is_open)
    return made
