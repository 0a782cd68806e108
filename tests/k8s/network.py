"""Which pods the network policies of an overlay let connect: NetworkPolicy as its API reference
defines it."""

from __future__ import annotations

from typing import Any

from tools.manifests import Object, pod_spec


class Network:
    """Pods by their labels, and what their policies allow between them."""

    def __init__(self, objects: list[Object]) -> None:
        self._policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
        made = [
            each["spec"]["template"]["metadata"]["labels"] for each in objects if pod_spec(each)
        ]
        self.components = {each["app.kubernetes.io/component"]: each for each in made}

    def reaches(self, source: str, target: str, port: int) -> bool:
        """Whether pods of one component may open a TCP connection to another's port."""
        ends = self.components[source], self.components[target]
        return self._allows("Egress", *ends, port) and self._allows("Ingress", *ends[::-1], port)

    def lets_in(self, target: str, port: int, namespace: str) -> bool:
        """Whether pods of another namespace, of that name, may."""
        return self._allows(
            "Ingress",
            self.components[target],
            {"kubernetes.io/metadata.name": namespace},
            port,
            is_foreign=True,
        )

    def lets_out(self, source: str, port: int, namespace: str) -> bool:
        """Whether they may open one to a pod of another namespace."""
        return self._allows(
            "Egress",
            self.components[source],
            {"kubernetes.io/metadata.name": namespace},
            port,
            is_foreign=True,
        )

    def _allows(
        self,
        direction: str,
        own: dict[str, str],
        peer: dict[str, str],
        port: int,
        *,
        is_foreign: bool = False,
    ) -> bool:
        chosen = [
            policy
            for policy in self._policies
            if direction in policy["policyTypes"] and matches(policy["podSelector"], own)
        ]
        side = "to" if direction == "Egress" else "from"
        rules = [rule for policy in chosen for rule in policy.get(direction.lower(), ())]
        return not chosen or any(
            _has_port(rule, port) and _has_peer(rule.get(side), peer, is_foreign) for rule in rules
        )


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector chooses the labels. Raises ValueError for an operator but In."""
    for each in selector.get("matchExpressions", ()):
        if each["operator"] != "In":
            raise ValueError(f"{each['operator']} is not supported")
        if labels.get(each["key"]) not in each["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def _has_port(rule: Object, port: int) -> bool:
    ports = rule.get("ports")
    return ports is None or any(each == {"protocol": "TCP", "port": port} for each in ports)


def _has_peer(peers: list[Object] | None, labels: dict[str, str], is_foreign: bool) -> bool:
    """Address blocks are of hosts outside of the cluster."""
    if peers is None:
        return True
    kind = "namespaceSelector" if is_foreign else "podSelector"
    return any(kind in peer and matches(peer[kind], labels) for peer in peers)
