"""The part of kustomize that deploy/kubernetes uses; anything else in a kustomization is an error.

``resources`` (files and folders), ``namespace``, ``images``, and ``patches``: strategic merges and JSON patches (RFC
6902), from a file or in place, with an optional target. ``test_manifests.py`` compares it with the real one where
kubectl is installed.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
FIELDS = {"apiVersion", "kind", "resources", "namespace", "images", "patches"}
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Lists of a pod that a strategic merge joins by a key; other lists are replaced."""


def documents(text: str) -> list[Manifest]:
    """Return the objects in a YAML file. Anchors are resolved and merge keys applied."""
    return [each for each in yaml.safe_load_all(text) if each is not None]


def build(folder: Path) -> list[Manifest]:
    """Render the kustomization in ``folder``. Raises ValueError for a field or patch that is not supported."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if strange := set(kustomization) - FIELDS:
        raise ValueError(f"{folder}: this stand-in does not know {sorted(strange)}")
    resources: list[Manifest] = []
    for name in kustomization["resources"]:
        path = folder / name
        resources += build(path.resolve()) if path.is_dir() else documents(path.read_text())
    names = [(each["kind"], each["metadata"]["name"]) for each in resources]
    if len(set(names)) < len(names):
        raise ValueError(f"{folder}: two resources have the same name")
    for patch in kustomization.get("patches", ()):
        resources = _patched(resources, patch, folder)
    for resource in resources:
        if "namespace" in kustomization:
            resource["metadata"]["namespace"] = kustomization["namespace"]
        for image in kustomization.get("images", ()):
            _set_image(resource, image)
    return resources


def pod_spec(manifest: Manifest) -> Manifest | None:
    """Return the pod spec of a Deployment, StatefulSet or the like, None for other kinds."""
    template = manifest.get("spec", {}).get("template", {})
    return template.get("spec") if isinstance(template, dict) and "spec" in template else None


def _set_image(resource: Manifest, image: Manifest) -> None:
    spec = pod_spec(resource) or {}
    for container in (*spec.get("containers", ()), *spec.get("initContainers", ())):
        if container["image"].partition(":")[0] == image["name"]:
            container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"


def _patched(resources: list[Manifest], patch: Manifest, folder: Path) -> list[Manifest]:
    if strange := set(patch) - {"path", "patch", "target"}:
        raise ValueError(f"{folder}: this stand-in does not know {sorted(strange)} of a patch")
    text = (folder / patch["path"]).read_text() if "path" in patch else patch["patch"]
    body = yaml.safe_load(text)
    target = patch.get("target") or {"kind": body["kind"], "name": re.escape(body["metadata"]["name"])}
    if strange := set(target) - {"kind", "name"}:
        raise ValueError(f"{folder}: this stand-in does not know {sorted(strange)} of a target")
    chosen = [each for each in resources if _matches(each, target)]
    if not chosen:
        raise ValueError(f"{folder}: a patch of {target} finds nothing")
    if isinstance(body, list):
        for resource in chosen:
            for operation in body:
                _operate(resource, operation)
        return resources
    if body.get("$patch") == "delete":
        return [each for each in resources if each not in chosen]
    changes = {name: value for name, value in body.items() if name not in ("apiVersion", "kind", "metadata")}
    changes["metadata"] = {name: value for name, value in body["metadata"].items() if name != "name"}
    for resource in chosen:
        _merge(resource, changes)
    return resources


def _matches(resource: Manifest, target: Manifest) -> bool:
    return resource["kind"] == target["kind"] and bool(re.fullmatch(target["name"], resource["metadata"]["name"]))


def _merge(into: Manifest, changes: Manifest) -> None:
    """Apply a strategic merge to ``into``."""
    for name, value in changes.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        elif isinstance(value, list) and isinstance(into.get(name), list) and name in MERGE_KEYS:
            into[name] = _joined(into[name], value, MERGE_KEYS[name])
        else:
            into[name] = copy.deepcopy(value)


def _joined(before: list[Manifest], changes: list[Manifest], key: str) -> list[Manifest]:
    """Return the list with each change merged into the item with its key. New items come first, as in kustomize."""
    found = {each[key]: each for each in before}
    fresh = []
    for change in changes:
        if change[key] in found:
            _merge(found[change[key]], change)
        else:
            fresh.append(copy.deepcopy(change))
    return fresh + before


def _operate(resource: Manifest, operation: Manifest) -> None:
    """Apply one operation of a JSON patch: add, replace or remove."""
    *parents, last = [each.replace("~1", "/").replace("~0", "~") for each in operation["path"].split("/")[1:]]
    place: Any = resource
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    match operation["op"], place:
        case "add", list():
            place.insert(len(place) if last == "-" else int(last), copy.deepcopy(operation["value"]))
        case "add", dict():
            place[last] = copy.deepcopy(operation["value"])
        case "replace", list():
            place[int(last)] = copy.deepcopy(operation["value"])
        case "replace", dict():
            if last not in place:
                raise ValueError(f"{operation['path']} is not there")
            place[last] = copy.deepcopy(operation["value"])
        case "remove", list():
            del place[int(last)]
        case "remove", dict():
            del place[last]
        case _:
            raise ValueError(f"this stand-in does not know the operation {operation['op']!r}")
