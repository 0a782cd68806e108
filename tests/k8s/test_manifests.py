"""The manifests without a cluster: valid, confined, and in the product's own words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from loraplex.cli import cli
from loraplex.settings import SECRETS, Settings, load_settings, parse_size
from tools.manifests import OVERLAYS, RENDERED, ROOT, Object, find_kubectl, kustomize
from web.held_bytes import MAX_ANSWER_BYTES

VERSIONS = ("1.32", "1.37")
OWN = re.compile(r"registry\.example/loraplex/(gateway|admin|worker-cpu|worker-cuda):\d+\.\d+\.\d+")
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
PROCESS_BYTES = {"gateway": 512 << 20, "admin": 512 << 20, "worker": 2 << 30, "migrate": 128 << 20}
"""What a process takes beside what its settings bound: interpreter, libraries, requests."""
SECRET_NAMES = {
    *("loraplex-database", "loraplex-database-owner", "loraplex-pepper", "loraplex-store"),
    *("loraplex-gateway-tls", "loraplex-worker-tls", "postgres"),
}

CUSTOM = {
    ("cert-manager.io/v1", "Issuer"),
    ("cert-manager.io/v1", "Certificate"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("inference.networking.k8s.io/v1", "InferencePool"),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
}
"""Custom resources: their schemas are their projects'."""

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@cache
def objects_of(overlay: str) -> list[Object]:
    return list(yaml.safe_load_all((RENDERED / f"{overlay}.yaml").read_text()))


def pod_spec(found: Object) -> Object | None:
    """Returns the pod that an object makes, or None if it makes none."""
    return found.get("spec", {}).get("template", {}).get("spec")


def all_containers(objects: list[Object]) -> list[Object]:
    """Returns the containers and sidecars of all pods."""
    pods = [pod for found in objects if (pod := pod_spec(found)) is not None]
    return [
        each
        for pod in pods
        for part in ("initContainers", "containers")
        for each in pod.get(part, ())
    ]


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Returns whether a label selector chooses the labels."""
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In", each
        if labels.get(each["key"]) not in each["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def workloads(overlay: str) -> list[Object]:
    return [each for each in objects_of(overlay) if pod_spec(each) is not None]


def find(overlay: str, kind: str, name: str) -> Object:
    chosen = [
        each
        for each in objects_of(overlay)
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    assert len(chosen) == 1, f"{kind} {name}: {len(chosen)}"
    return chosen[0]


def own_containers(overlay: str) -> Iterator[tuple[Object, Object]]:
    """Each workload with each of its containers that runs the product."""
    for workload in workloads(overlay):
        for container in all_containers([workload]):
            if OWN.fullmatch(container["image"]):
                yield workload, container


def environment(overlay: str, container: Object) -> dict[str, str]:
    """What the container's process finds."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= find(overlay, "ConfigMap", source["configMapRef"]["name"])["data"]
    return found | {each["name"]: each["value"] for each in container.get("env", ())}


def settings_of(overlay: str, container: Object, folder: Path) -> Settings:
    """The settings as the process reads them, secret files and all. Raises BadSettings."""
    given = environment(overlay, container)
    for name in SECRETS:
        variable = f"LORAPLEX_{name.upper()}_FILE"
        if variable in given:
            assert is_mounted(container, given[variable]), given[variable]
            (folder / name).write_text("secret")
            given[variable] = str(folder / name)
    return load_settings({}, given)


def is_mounted(container: Object, path: str) -> bool:
    return any(
        path.startswith(f"{mount['mountPath']}/") for mount in container.get("volumeMounts", ())
    )


def command_of(container: Object) -> list[str]:
    return [*container.get("command", ()), *container.get("args", ())]


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


@every_overlay
def test_what_is_checked_in_is_what_kustomize_makes(overlay: str) -> None:
    kubectl = find_kubectl()
    if kubectl is None:
        pytest.skip("needs kubectl, for its Kustomize")
    made = list(yaml.safe_load_all(kustomize(kubectl, overlay)))
    assert objects_of(overlay) == made, "run `make manifests`"


@every_overlay
def test_every_object_is_valid(overlay: str) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects_of(overlay)]
    assert len(set(names)) == len(names)
    for each in objects_of(overlay):
        if each["kind"] != "Namespace":
            assert each["metadata"]["namespace"] == "loraplex", each["metadata"]
        if (each["apiVersion"], each["kind"]) in CUSTOM:
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)


@every_overlay
def test_containers_are_confined(overlay: str) -> None:
    for workload in workloads(overlay):
        pod: Any = pod_spec(workload)
        name = workload["metadata"]["name"]
        context = pod["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] and context["runAsGroup"], name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["enableServiceLinks"] is False, name
        if pod.get("serviceAccountName") is None:
            assert pod["automountServiceAccountToken"] is False, name
        if workload["spec"].get("volumeClaimTemplates"):
            assert context["fsGroup"] == context["runAsGroup"], name
        for container in all_containers([workload]):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True, name
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            resources = container["resources"]
            assert resources["requests"]["cpu"] and resources["requests"]["memory"], name
            assert resources["limits"]["memory"] == resources["requests"]["memory"], name
            image = container["image"].rpartition(":")
            assert image[2] not in ("", "latest"), name
            if workload["kind"] != "Job":
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    assert probe in container, f"{name}: {probe}"


@every_overlay
def test_secrets_come_as_files(overlay: str) -> None:
    assert not [each for each in objects_of(overlay) if each["kind"] == "Secret"]
    for workload in workloads(overlay):
        pod: Any = pod_spec(workload)
        mounted = (
            [each["secret"] for each in pod["volumes"] if "secret" in each]
            if pod.get("volumes")
            else []
        )
        assert {each["secretName"] for each in mounted} <= SECRET_NAMES
        assert all(each["defaultMode"] == 0o440 for each in mounted)
        for container in all_containers([workload]):
            assert not [each for each in container.get("env", ()) if "valueFrom" in each]
            assert not [each for each in container.get("envFrom", ()) if "secretRef" in each]
            volumes = {each["name"] for each in pod.get("volumes", ())}
            volumes |= {
                each["metadata"]["name"]
                for each in workload["spec"].get("volumeClaimTemplates", ())
            }
            for mount in container.get("volumeMounts", ()):
                assert mount["name"] in volumes


@every_overlay
def test_commands_and_settings_are_the_product_s(overlay: str, tmp_path: Path) -> None:
    roles: set[str] = set()
    for _, container in own_containers(overlay):
        command, role, *arguments = command_of(container)
        assert command == "loraplex"
        # Refuses a flag that is not there.
        context = click.Context(cli)
        product = cli.get_command(context, role)
        assert product is not None
        with product.make_context(role, arguments, parent=context):
            roles.add(role)
        settings_of(overlay, container, tmp_path)
        given = environment(overlay, container)
        for name in ("transport_certificate", "transport_key", "transport_authority"):
            if (file := given.get(f"LORAPLEX_{name.upper()}")) is not None:
                assert is_mounted(container, file), file
    assert roles == {"gateway", "worker", "admin", "migrate"}


@every_overlay
def test_memory_and_disk_follow_from_the_settings(overlay: str, tmp_path: Path) -> None:
    for workload, container in own_containers(overlay):
        settings = settings_of(overlay, container, tmp_path)
        role = command_of(container)[1]
        limit = num_bytes(container["resources"]["limits"]["memory"])
        needed = PROCESS_BYTES[role]
        disk = settings.min_free_disk
        match role:
            case "gateway":
                needed += settings.max_body_memory + MAX_ANSWER_BYTES
                disk += settings.max_usage_wal
            case "admin":
                needed += settings.max_body_memory + MAX_ANSWER_BYTES
                disk += 2 * settings.max_upload
            case "worker":
                on_host = settings.device_memory
                if settings.device == "cuda":
                    on_host = settings.host_model_memory
                assert settings.device_memory is not None and on_host is not None
                needed += on_host + settings.host_adapter_memory
                disk += settings.adapter_cache + settings.device_memory
                assert str(settings.threads) == container["resources"]["limits"]["cpu"]
            case _:
                continue
        assert needed <= limit, f"{role}: {needed} of {limit} bytes"
        mount = next(m for m in container["volumeMounts"] if m["mountPath"] == "/var/lib/loraplex")
        claims = {
            each["metadata"]["name"]: each for each in workload["spec"]["volumeClaimTemplates"]
        }
        claim = claims[mount["name"]]["spec"]["resources"]["requests"]["storage"]
        assert disk <= num_bytes(claim), f"{role}: {disk} of {claim}"


@every_overlay
def test_a_drain_fits_into_the_grace(overlay: str, tmp_path: Path) -> None:
    for workload in workloads(overlay):
        drains, pauses = [0.0], [0]
        for container in all_containers([workload]):
            role = [*command_of(container), ""][1]
            if role in ("gateway", "admin", "worker") and OWN.fullmatch(container["image"]):
                drain_s = settings_of(overlay, container, tmp_path).drain_s
                assert drain_s is not None
                drains.append(drain_s)
            if role in ("gateway", "admin"):
                # While proxies still send requests.
                pauses.append(container["lifecycle"]["preStop"]["sleep"]["seconds"])
        pod: Any = pod_spec(workload)
        if len(drains) > 1:
            # A sidecar drains when the containers have ended.
            assert sum(drains) + sum(pauses) + 10 <= pod["terminationGracePeriodSeconds"]


@every_overlay
def test_replicas_are_spread_and_not_all_disrupted(overlay: str) -> None:
    budgets = [each for each in objects_of(overlay) if each["kind"] == "PodDisruptionBudget"]
    for workload, container in own_containers(overlay):
        if command_of(container)[1] == "migrate":
            continue
        labels = workload["spec"]["template"]["metadata"]["labels"]
        chosen = [each for each in budgets if matches(each["spec"]["selector"], labels)]
        assert [each["spec"]["maxUnavailable"] for each in chosen] == [1]
        assert workload["spec"]["selector"]["matchLabels"] == labels
        pod: Any = pod_spec(workload)
        if workload["metadata"]["name"] != "loraplex-admin":
            keys = {each["topologyKey"] for each in pod["topologySpreadConstraints"]}
            assert keys == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}


@every_overlay
def test_pods_go_to_nodes_that_can_run_them(overlay: str) -> None:
    """Nodes of the images' kind; one node for those that share a volume which one node has."""
    users: dict[str, list[Object]] = {}
    for workload, _ in own_containers(overlay):
        pod: Any = pod_spec(workload)
        kind = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        assert pod["nodeSelector"] == kind, workload["metadata"]["name"]
        for volume in pod["volumes"]:
            if (claim := volume.get("persistentVolumeClaim")) is not None:
                users.setdefault(claim["claimName"], []).append(workload)
    assert set(users) == ({"loraplex-store"} if overlay == "single-gpu" else set())
    for claim, workloads in users.items():
        assert find(overlay, "PersistentVolumeClaim", claim)["spec"]["accessModes"] == [
            "ReadWriteOnce"
        ]
        worker = find(overlay, "StatefulSet", "loraplex-worker")
        others = [each for each in workloads if each is not worker]
        assert len(others) == 2 and worker["spec"]["replicas"] == 1
        for each in others:
            pod = pod_spec(each)
            (term,) = pod["affinity"]["podAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]
            assert term["topologyKey"] == "kubernetes.io/hostname"
            assert matches(term["labelSelector"], worker["spec"]["template"]["metadata"]["labels"])


@every_overlay
def test_ports_and_selectors_meet(overlay: str) -> None:
    for service in (each for each in objects_of(overlay) if each["kind"] == "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        chosen = [
            each
            for each in workloads(overlay)
            if matches(selector, each["spec"]["template"]["metadata"]["labels"])
        ]
        assert len(chosen) == 1, service["metadata"]["name"]
        names = {port["name"] for each in all_containers(chosen) for port in each["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for _, container in own_containers(overlay):
        named = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        given = environment(overlay, container)
        match command_of(container)[1]:
            case "gateway" | "admin":
                assert str(named["http"]) == given["LORAPLEX_PORT"]
                assert str(named["management"]) == given["LORAPLEX_MANAGEMENT_PORT"]
            case "worker":
                told = " ".join(container["args"])
                assert f"--health=0.0.0.0:{named['health']}" in told
                assert "transport" not in named or f":{named['transport']}" in told


@every_overlay
def test_what_no_policy_opens_is_closed(overlay: str) -> None:
    default = find(overlay, "NetworkPolicy", "loraplex-default")["spec"]
    assert default["podSelector"] == {} and "ingress" not in default
    assert set(default["policyTypes"]) == {"Ingress", "Egress"}


@pytest.mark.parametrize("overlay", [each for each in OVERLAYS if each != "gaie"])
def test_addresses_and_certificates_name_the_pods(overlay: str, tmp_path: Path) -> None:
    """A worker is let in by the name that it is reached by, a gateway by the name of its role."""
    read = {
        container["name"]: settings_of(overlay, container, tmp_path)
        for _, container in own_containers(overlay)
    }
    gateway, worker = read["gateway"], read["worker"]
    service = find(overlay, "StatefulSet", "loraplex-worker")["spec"]["serviceName"]
    hosts = [f"loraplex-worker-{n}.{service}.loraplex.svc" for n in range(len(gateway.workers))]
    assert list(gateway.workers) == [f"tcp://{host}:9000" for host in hosts]
    num_most = find(overlay, "StatefulSet", "loraplex-worker")["spec"].get("replicas")
    if overlay == "observability":
        assert num_most is None, "each roll-out would undo what KEDA did"
        num_most = find(overlay, "ScaledObject", "loraplex-worker")["spec"]["maxReplicaCount"]
    assert num_most <= len(hosts)
    assert not gateway.insecure_transport and not worker.insecure_transport
    if overlay == "single-gpu":
        return  # its certificates are made by hand
    for role, certificate in (("gateway", "loraplex-gateway"), ("worker", "loraplex-worker")):
        spec = find(overlay, "Certificate", certificate)["spec"]
        patterns = worker.transport_gateways if role == "gateway" else gateway.transport_workers
        assert all(
            any(fnmatchcase(f"DNS:{name}", pattern) for pattern in patterns)
            for name in spec["dnsNames"]
        )
        other = worker.transport_gateways if role == "worker" else gateway.transport_workers
        assert not any(fnmatchcase(f"DNS:{n}", p) for n in spec["dnsNames"] for p in other)
        workload = find(overlay, "StatefulSet", certificate)
        pod: Any = pod_spec(workload)
        mounted = {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
        assert spec["secretName"] in mounted
        if role == "worker":
            (name,) = spec["dnsNames"]
            assert all(host.split(".", 1)[1] == name.removeprefix("*.") for host in hosts)


def test_what_scales_the_workers_is_a_metric_of_theirs() -> None:
    """The page is held to a running worker by `tests/e2e/test_metrics.py`."""
    page = (ROOT.parent / "docs" / "operate" / "metrics.md").read_text()
    for trigger in find("observability", "ScaledObject", "loraplex-worker")["spec"]["triggers"]:
        (name,) = re.findall(r"vllm:\w+", trigger["metadata"]["query"])
        assert f"`{name.removesuffix('_bucket')}`" in page, name


def test_the_page_makes_every_secret() -> None:
    page = (ROOT.parent / "docs" / "operate" / "kubernetes.md").read_text()
    for name in SECRET_NAMES:
        assert re.search(rf"create secret generic {name}\b", page), name


def test_sizes_in_manifests_are_those_of_settings() -> None:
    """The test's own reading of a quantity agrees with the product's."""
    assert num_bytes("9Gi") == parse_size("9GiB") and num_bytes("256Mi") == parse_size("256MiB")
