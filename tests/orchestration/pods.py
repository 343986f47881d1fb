"""What the manifests say about pods: their specs, the arguments and environment of their containers, their files.

Used by the checks of the manifests and by the stand-in that runs them.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.options import Loaded
from deploy.cli.commands import COMMANDS, load_config
from deploy.cli.main import build_parser
from tests.leaked_keys import register
from tests.orchestration.kustomize import Manifest, documents, pod_spec

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(frozen=True)
class PodTemplate:
    """A pod template and the workload that it belongs to."""

    owner: Manifest
    labels: dict[str, str]
    spec: Manifest

    @property
    def name(self) -> str:
        """Kind and name of the workload, and the role."""
        role = self.labels.get("app.kubernetes.io/component")
        return f"{self.owner['kind']} {self.owner['metadata']['name']} ({role})"

    @property
    def container(self) -> Manifest:
        """Its only container."""
        (found,) = self.spec["containers"]
        assert isinstance(found, dict)
        return found


def templates(manifests: list[Manifest]) -> Iterator[PodTemplate]:
    """Yield every pod template in ``manifests``."""
    for manifest in manifests:
        if pod_spec(manifest) is not None:
            template = manifest["spec"]["template"]
            yield PodTemplate(manifest, template["metadata"]["labels"], template["spec"])
        elif manifest["kind"] == "LeaderWorkerSet":
            group = manifest["spec"]["leaderWorkerTemplate"]
            for each in group["leaderTemplate"], group["workerTemplate"]:
                yield PodTemplate(manifest, each["metadata"]["labels"], each["spec"])


def new_secrets() -> list[Manifest]:
    """Return the Secrets that deploy/kubernetes/secrets.sh prints. No log may contain their values from now on."""
    program = f"{sys.executable} -m deploy.cli"
    script = (KUBERNETES / "secrets.sh").read_text().replace('"$tandem"', "$tandem")
    done = subprocess.run(
        ["bash", "-c", script, str(KUBERNETES / "secrets.sh")],
        env=os.environ | {"TANDEM": program},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    secrets = documents(done.stdout)
    for secret in secrets:
        for value in secret["data"].values():
            for line in base64.b64decode(value).decode().splitlines():
                if len(line) > 20 and " " not in line and "{" not in line:
                    register(line)
    return secrets


class PodFiles:
    """Writes the volumes of pods below ``directory``, from the ConfigMaps and Secrets among ``objects``."""

    def __init__(self, directory: Path, objects: list[Manifest]) -> None:
        self._directory = directory
        self._objects = {(each["kind"], each["metadata"]["name"]): each for each in objects}

    def mounts(self, template: PodTemplate, pod: str) -> dict[str, Path]:
        """Create the volumes of one pod; return the folder of each mount path."""
        folders = {}
        for volume in template.spec["volumes"]:
            folder = self._directory / pod / volume["name"]
            folder.mkdir(parents=True)
            folder.chmod(0o700)
            for name, content in self._content(volume).items():
                (folder / name).write_bytes(content)
                (folder / name).chmod(0o600)
            folders[volume["name"]] = folder
        return {each["mountPath"]: folders[each["name"]] for each in template.container["volumeMounts"]}

    def _content(self, volume: Manifest) -> dict[str, bytes]:
        if "configMap" in volume:
            data = self._objects["ConfigMap", volume["configMap"]["name"]]["data"]
            return {name: text.encode() for name, text in data.items()}
        if "secret" in volume:
            data = self._objects["Secret", volume["secret"]["secretName"]]["data"]
            return {name: base64.b64decode(text) for name, text in data.items()}
        assert "emptyDir" in volume, volume
        return {}

    def environment(self, template: PodTemplate, facts: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a container. ``facts`` are the fields of the downward API, such as
        ``status.podIP``."""
        found: dict[str, str] = {}
        for entry in template.container.get("env", ()):
            source = entry.get("valueFrom", {})
            if "value" in entry:
                found[entry["name"]] = entry["value"]
            elif "fieldRef" in source:
                found[entry["name"]] = facts[source["fieldRef"]["fieldPath"]]
            else:
                reference = source["secretKeyRef"]
                secret = self._objects.get(("Secret", reference["name"]))
                if secret is None:
                    assert reference.get("optional"), f"there is no Secret {reference['name']}"
                    continue
                found[entry["name"]] = base64.b64decode(secret["data"][reference["key"]]).decode()
        return found


def arguments(template: PodTemplate, environment: Mapping[str, str], mounts: Mapping[str, Path]) -> list[str]:
    """Return the arguments of a container, with variables filled in and paths in volumes replaced."""
    return [inside(expanded(each, environment), mounts) for each in template.container["args"]]


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """Fill in ``$(NAME)``; an unknown name is an error here, though Kubernetes leaves it as it is."""
    return _VARIABLE.sub(lambda match: environment[match[1]], text)


def inside(text: str, mounts: Mapping[str, Path]) -> str:
    """Replace a path below a mount path by that of its folder."""
    paths = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
    return re.sub(rf"(^|=)({paths})(?=/|$)", lambda match: f"{match[1]}{mounts[match[2]]}", text)


def parsed(words: list[str], environment: Mapping[str, str]) -> Loaded[Any]:
    """Read a command line and its environment as ``tandem`` does. Raises StartError if they are invalid."""
    parser, _ = build_parser()
    given = vars(parser.parse_args(words))
    command = COMMANDS[words[0]]
    del given["run"]
    return load_config(command.config, given, environment, **command.fixed)
