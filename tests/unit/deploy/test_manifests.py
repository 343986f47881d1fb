"""The manifests in deploy/kubernetes: valid, consistent with each other, and understood by Tandem's command line."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from common.config.coordinator import CoordinatorConfig
from common.config.worker import WorkerConfig
from tests.orchestration.crds import SCHEMAS
from tests.orchestration.kustomize import Manifest, build, pod_spec
from tests.orchestration.pods import (
    KUBERNETES,
    PodFiles,
    PodTemplate,
    arguments,
    inside,
    new_secrets,
    parsed,
    templates,
)

FOLDERS = ("overlays/cpu", "overlays/gpu", "overlays/gpu-pairs", "monitoring", "tracing", "autoscaling/hpa",
           "autoscaling/keda", "gateway")  # fmt: skip
OVERLAYS = tuple(each for each in FOLDERS if each.startswith("overlays/"))
VERSIONS = ("1.31", "1.37")
"""Oldest and newest version of Kubernetes whose schemas the manifests are checked with."""
METRICS = Path(__file__).parents[2] / "golden" / "metrics.txt"


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Manifest]]:
    return {folder: build(KUBERNETES / folder) for folder in FOLDERS}


@pytest.fixture(scope="module")
def secrets() -> list[Manifest]:
    return new_secrets()


def of_kind(manifests: list[Manifest], *kinds: str) -> Iterator[Manifest]:
    yield from (each for each in manifests if each["kind"] in kinds)


def selects(labels: dict[str, str], selector: Manifest) -> bool:
    """Return whether a label selector matches ``labels``."""
    for rule in selector.get("matchExpressions", ()):
        assert rule["operator"] == "In", rule
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def check(manifest: Manifest, version: str) -> None:
    """Raise a validation error unless ``manifest`` fits the schema of its kind."""
    if schema := SCHEMAS.get(manifest["kind"]):
        jsonschema.Draft202012Validator(schema).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def as_pod(template: PodTemplate) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", "labels": template.labels},
        "spec": template.spec,
    }


def test_every_folder_is_rendered() -> None:
    found = {str(path.parent.relative_to(KUBERNETES)) for path in KUBERNETES.rglob("kustomization.yaml")}
    assert found == {*FOLDERS, "base"}
    named = set()
    for path in KUBERNETES.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text())
        patches = [each["path"] for each in kustomization.get("patches", ()) if "path" in each]
        named |= {(path.parent / name).resolve() for name in (*kustomization["resources"], *patches)}
    files = {path.resolve() for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml"}
    assert files - named == {KUBERNETES / "autoscaling" / "hpa" / "prometheus-adapter.yaml"}


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="compares with kubectl's kustomize")
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_stand_in_renders_as_kustomize_does(folder: str, rendered: dict[str, list[Manifest]]) -> None:
    done = subprocess.run(["kubectl", "kustomize", KUBERNETES / folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr

    def by_name(manifests: list[Manifest]) -> dict[Any, Manifest]:
        return {(each["kind"], each["metadata"]["name"]): each for each in manifests}

    assert by_name(list(yaml.safe_load_all(done.stdout))) == by_name(rendered[folder])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_schemas_accept_them(folder: str, version: str, rendered: dict[str, list[Manifest]]) -> None:
    for manifest in rendered[folder]:
        check(manifest, version)
    for template in templates(rendered[folder]):
        kubernetes_validate.validate(as_pod(template), version, strict=True)


def test_schemas_refuse_errors(rendered: dict[str, list[Manifest]]) -> None:
    """Else the test above could not fail."""
    for manifests in rendered.values():
        for manifest in manifests:
            spec = manifest.get("spec")
            if spec is None:
                continue
            wrong = {**manifest, "spec": {**spec, "replica": 1}}
            with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
                check(wrong, VERSIONS[-1])


@pytest.mark.processes
def test_secrets_fit_their_schema_and_are_all_that_is_needed(
    secrets: list[Manifest], rendered: dict[str, list[Manifest]]
) -> None:
    for secret in secrets:
        kubernetes_validate.validate(secret, VERSIONS[-1], strict=True)
    have = {secret["metadata"]["name"]: set(secret["data"]) for secret in secrets}
    needed = {"tandem-metrics-key": {"key"}}  # of the PodMonitor
    for manifests in rendered.values():
        for template in templates(manifests):
            for volume in template.spec["volumes"]:
                if "secret" in volume:
                    needed.setdefault(volume["secret"]["secretName"], set())
            for entry in template.container["env"]:
                reference = entry.get("valueFrom", {}).get("secretKeyRef")
                if reference and not reference.get("optional"):
                    needed.setdefault(reference["name"], set()).add(reference["key"])
    assert have.keys() == needed.keys()
    assert all(keys <= have[name] for name, keys in needed.items())


@pytest.mark.processes
@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_command_line_understands_every_container(
    folder: str, rendered: dict[str, list[Manifest]], secrets: list[Manifest], tmp_path: Path
) -> None:
    files = PodFiles(tmp_path, [*rendered[folder], *secrets])
    roles = []
    for template in templates(rendered[folder]):
        pod = template.labels["app.kubernetes.io/component"]
        mounts = files.mounts(template, pod)
        environment = files.environment(template, {"status.podIP": "10.1.2.3", "metadata.name": f"{pod}-x1"})
        own = {name: inside(text, mounts) for name, text in environment.items() if name.startswith("TANDEM_")}
        loaded = parsed(arguments(template, environment, mounts), own)
        assert not loaded.warnings, template.name
        config = loaded.config
        config.check_binds()
        roles.append(pod)
        grace_s = template.spec["terminationGracePeriodSeconds"]
        if isinstance(config, CoordinatorConfig):
            assert grace_s >= config.handover_time + config.drain_timeout + 10
            assert (
                len(config.api_keys()) == 2 and config.admin_api_key and config.admin_api_key not in config.api_keys()
            )
            assert config.starting_wait >= 30, "it is ready before workers join"
            ports = {"http": config.port, "control": config.control_port}
        else:
            assert isinstance(config, WorkerConfig)
            assert grace_s >= config.drain_timeout + 10
            assert (config.host, config.name) == ("10.1.2.3", f"{pod}-x1")
            assert config.role == pod
            ports = {"health": config.health_port}
            gpus = int(template.container["resources"]["limits"].get("nvidia.com/gpu", 0))
            assert (config.device == "cuda") == bool(gpus) and config.tensor_parallel_size == max(1, gpus)
        assert {each["name"]: each["containerPort"] for each in template.container["ports"]} == ports
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert template.container[kind]["httpGet"]["port"] in ports
    assert sorted(roles) == ["coordinator", "decode", "prefill"]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_pods_meet_the_restricted_profile(folder: str, rendered: dict[str, list[Manifest]]) -> None:
    for template in templates(rendered[folder]):
        spec, container = template.spec, template.container
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        own = container["securityContext"]
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert all({"configMap", "secret", "emptyDir"} & volume.keys() for volume in spec["volumes"])
        writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
        assert {"/cache", "/tmp"} <= writable <= {"/cache", "/tmp", "/dev/shm"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "TANDEM_PORT of a Service would be taken for --port"
        for volume in spec["volumes"]:  # readable by the group that fsGroup gives, and by nobody else
            assert volume.get("secret", {"defaultMode": 0o440})["defaultMode"] == 0o440


@pytest.mark.parametrize("folder", OVERLAYS)
def test_selectors_find_their_pods(folder: str, rendered: dict[str, list[Manifest]]) -> None:
    manifests = rendered[folder]
    pods = list(templates(manifests))
    assert {each["metadata"]["namespace"] for each in manifests} == {"tandem"}
    for workload in of_kind(manifests, "Deployment"):
        assert selects(workload["spec"]["template"]["metadata"]["labels"], workload["spec"]["selector"])
        others = [each for each in pods if each.owner is not workload]
        assert not any(selects(each.labels, workload["spec"]["selector"]) for each in others)
    for service in of_kind(manifests, "Service"):
        found = [each for each in pods if selects(each.labels, {"matchLabels": service["spec"]["selector"]})]
        assert [each.labels["app.kubernetes.io/component"] for each in found] == ["coordinator"]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in {each["name"] for each in found[0].container["ports"]}
    for each in of_kind(manifests, "PodDisruptionBudget"):
        assert sum(selects(pod.labels, each["spec"]["selector"]) for pod in pods) == 1
    (control,) = (each for each in of_kind(manifests, "Service") if each["metadata"]["name"] == "tandem-control")
    address = f"{control['metadata']['name']}:{control['spec']['ports'][0]['port']}"
    for pod in pods:
        if pod.labels["app.kubernetes.io/component"] != "coordinator":
            assert f"--coordinator={address}" in pod.container["args"]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_policies_let_through_what_is_needed_and_no_more(folder: str, rendered: dict[str, list[Manifest]]) -> None:
    pods = {each.labels["app.kubernetes.io/component"]: each for each in templates(rendered[folder])}
    policies = list(of_kind(rendered[folder], "NetworkPolicy"))

    def lets_in(role: str, port: int | str, other: dict[str, str]) -> bool:
        chosen = [each["spec"] for each in policies if selects(pods[role].labels, each["spec"]["podSelector"])]
        chosen = [each for each in chosen if "Ingress" in each["policyTypes"]]
        assert chosen, f"{role} is open to all"
        for rule in (rule for each in chosen for rule in each.get("ingress", ())):
            peers = rule.get("from")
            if peers is not None and not any(selects(other, peer["podSelector"]) for peer in peers):
                continue
            for each in rule["ports"]:
                first, last = each["port"], each.get("endPort", each["port"])
                if port == first or (isinstance(port, int) and isinstance(first, int) and first <= port <= last):
                    return True
        return False

    client: dict[str, str] = {"app": "a client"}
    prefill, decode, coordinator = (pods[role].labels for role in ("prefill", "decode", "coordinator"))
    assert lets_in("coordinator", "http", client)
    assert lets_in("coordinator", "control", prefill) and lets_in("coordinator", "control", decode)
    assert not lets_in("coordinator", "control", client)
    for port in 32768, 60999:
        assert lets_in("decode", port, prefill)
        assert not lets_in("decode", port, client) and not lets_in("decode", port, coordinator)
    assert not any(lets_in(role, "health", client) for role in ("prefill", "decode"))


def test_only_the_coordinator_may_send_traces(rendered: dict[str, list[Manifest]]) -> None:
    (policy,) = (each["spec"] for each in rendered["tracing"])
    pods = templates(rendered["overlays/cpu"])
    sends = [each.labels["app.kubernetes.io/component"] for each in pods if selects(each.labels, policy["podSelector"])]
    assert sends == ["coordinator"] and policy["policyTypes"] == ["Egress"]
    assert policy["egress"] == [{"ports": [{"port": 4318}], "to": [{"namespaceSelector": {}}]}]


def test_updates_keep_enough_workers(rendered: dict[str, list[Manifest]]) -> None:
    """Without spare pods, other workers of the role must remain; the coordinator is never stopped before the next one
    is there."""
    for folder in OVERLAYS:
        for each in of_kind(rendered[folder], "Deployment"):
            strategy, replicas = each["spec"]["strategy"], each["spec"]["replicas"]
            assert strategy["type"] == "RollingUpdate"
            rolling = strategy["rollingUpdate"]
            assert replicas - rolling["maxUnavailable"] >= 1
            if each["metadata"]["name"] == "tandem-coordinator":
                assert (replicas, rolling) == (1, {"maxSurge": 1, "maxUnavailable": 0})


def test_autoscalers_scale_what_is_there(rendered: dict[str, list[Manifest]]) -> None:
    targets = {each["metadata"]["name"]: each for each in of_kind(rendered["overlays/cpu"], "Deployment")}
    for folder, least, most in ("autoscaling/hpa", "minReplicas", "maxReplicas"), (
        "autoscaling/keda", "minReplicaCount", "maxReplicaCount",
    ):  # fmt: skip
        names = []
        for scaler in rendered[folder]:
            spec = scaler["spec"]
            target = targets[spec["scaleTargetRef"]["name"]]
            assert spec["scaleTargetRef"] == {
                "apiVersion": target["apiVersion"], "kind": target["kind"], "name": target["metadata"]["name"],
            }  # fmt: skip
            assert target["spec"]["replicas"] == spec[least] <= spec[most]
            names.append(target["metadata"]["name"])
        assert sorted(names) == ["tandem-decode", "tandem-prefill"]


def test_queries_read_metrics_that_exist(rendered: dict[str, list[Manifest]]) -> None:
    known = {line for line in METRICS.read_text().splitlines() if line and not line.startswith((" ", "#"))}
    adapter = yaml.safe_load((KUBERNETES / "autoscaling" / "hpa" / "prometheus-adapter.yaml").read_text())
    rules = adapter["rules"]["external"]
    keda = [
        trigger["metadata"]["query"] for each in rendered["autoscaling/keda"] for trigger in each["spec"]["triggers"]
    ]
    assert [each["metricsQuery"] for each in rules] == keda, "both scale alike"
    queries = [*keda, *(each["seriesQuery"] for each in rules)]
    read = {name for query in queries for name in re.findall(r"(?:vllm:|tandem_)[a-z_]+", query)}
    assert read and read <= known
    wanted = {m["external"]["metric"]["name"] for each in rendered["autoscaling/hpa"] for m in each["spec"]["metrics"]}
    assert wanted == {each["name"]["as"] for each in rules}


def test_what_watches_and_routes_finds_coordinators(rendered: dict[str, list[Manifest]]) -> None:
    pods = list(templates(rendered["overlays/cpu"]))
    (monitor,), (pool, route) = rendered["monitoring"], rendered["gateway"]
    for selector in monitor["spec"]["selector"], pool["spec"]["selector"]:
        (found,) = (each for each in pods if selects(each.labels, selector))
        assert found.labels["app.kubernetes.io/component"] == "coordinator"
    ports = {each["name"]: each["containerPort"] for each in found.container["ports"]}
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    assert found.labels[monitor["spec"]["jobLabel"]] == "tandem"
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    group = pool["apiVersion"].partition("/")[0]
    assert backend == {"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}


def test_unsupported_features_of_kustomize_are_errors(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\nnamePrefix: a-\n")
    with pytest.raises(ValueError, match="namePrefix"):
        build(tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        "resources: []\npatches: [{patch: '{kind: Deployment, metadata: {name: a}}'}]\n"
    )
    with pytest.raises(ValueError, match="finds nothing"):
        build(tmp_path)


def test_volumes_that_a_patch_adds_are_mounted(rendered: dict[str, list[Manifest]]) -> None:
    for manifests in rendered.values():
        for template in templates(manifests):
            assert pod_spec(template.owner) is None or template.spec is pod_spec(template.owner)
            volumes = [each["name"] for each in template.spec["volumes"]]
            assert sorted(volumes) == sorted(each["name"] for each in template.container["volumeMounts"])
