"""The images and the compose file: what can be checked without a container engine."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

from common.config.coordinator import CoordinatorConfig
from common.config.worker import WorkerConfig
from common.worker.health import HealthServer
from tests.leaked_keys import register
from tests.orchestration.pods import ROOT, inside, parsed

DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
_VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::([-?])([^}]*))?\}")


# -- images -----------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile: keyword and the rest, with continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage by its name, those of the stages it builds on first."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for keyword, rest in instructions():
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = [*found.get(base, ()), (keyword, base)]
        elif name:
            found[name].append((keyword, rest))
    return found


def context() -> set[str]:
    """Return the files of the repository that .dockerignore leaves in the build context."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]

    def kept(path: str) -> bool:
        included = True
        for rule in rules:
            pattern = rule.removeprefix("!")
            parts = path.split("/")
            prefixes = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
            if pattern.startswith("**/"):
                hit = any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in parts)
            else:
                hit = any(
                    fnmatch.fnmatchcase(each, pattern) and each.count("/") == pattern.count("/") for each in prefixes
                )
            if hit:
                included = rule.startswith("!")
        return included

    return {path for path in done.stdout.splitlines() if kept(path)}


def test_images_are_installed_as_make_up_does() -> None:
    """So the steps that CI runs are those of the images: the target install, with nothing else behind it."""
    for name, torch in ("built-cpu", "cpu"), ("built-cuda", "cuda"):
        runs = [rest for keyword, rest in stages()[name] if keyword == "RUN"]
        assert runs[-1] == f"make install TORCH={torch} EXTRAS=otel"
        (packages,) = runs[:-1]
        assert re.search(r"apt-get -qq -y install --no-install-recommends gcc libc6-dev make ", packages)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^install: \$\(VENV\)/\.installed ", makefile, re.M)
    assert re.search(r"^up: \$\(VENV\)/\.installed ", makefile, re.M)
    assert "[ $(TORCH) = cuda ] ||" in makefile
    system = (ROOT / ".ci" / "run").read_text()
    assert "gcc libc6-dev" in system and "missing=(make)" in system.replace("missing+=(make)", "missing=(make)")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_images_run_without_rights_and_write_two_folders(name: str) -> None:
    stage = stages()[name]
    assert [rest for keyword, rest in stage if keyword == "USER"][-1] == "10001:10001"
    last_copy = max(at for at, (keyword, _) in enumerate(stage) if keyword == "COPY")
    assert stage[last_copy][1] == f"--from=built-{name} /app /app"
    assert not any(keyword == "RUN" for keyword, _ in stage[last_copy:]), "the installation is the last layer"
    variables = dict(part.split("=", 1) for keyword, rest in stage if keyword == "ENV" for part in rest.split())
    assert variables["HOME"] == "/cache"
    for variable in "TANDEM_CACHE", "HF_HOME":
        assert variables[variable].startswith("/cache/")
    assert variables["PATH"].startswith("/app/.venv/bin:")
    assert not any(re.search("KEY|TOKEN|PASSWORD|SECRET", name) for name in variables)
    assert [rest for keyword, rest in stage if keyword == "ENTRYPOINT"] == ['["tandem"]']
    (check,) = (rest for keyword, rest in stage if keyword == "HEALTHCHECK")
    assert "/app/deploy/docker/healthcheck" in check
    installed = " ".join(rest for keyword, rest in stage if keyword == "RUN")
    assert "libgomp1" in installed and ("gcc" in installed) == (name == "cuda")
    assert "make" not in installed.split()


@pytest.mark.processes
def test_the_context_has_what_is_needed_and_little_else(tmp_path: Path) -> None:
    """The package is whole without what .dockerignore leaves out: every command's help can be made, and every module
    that installs."""
    files = context()
    assert not any(path.startswith(("tests/", "docs/", "bench/results/", ".git")) for path in files)
    assert {"Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= files
    for path in files:
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target)
    program = (
        "import pkgutil, importlib.util, deploy.cli.main as cli, common.builtin\n"
        "from deploy.cli.commands import COMMANDS\n"
        "from pathlib import Path\n"
        "assert Path(cli.__file__).is_relative_to(Path.cwd()), cli.__file__\n"
        "assert cli.main(['--help']) == 0 and common.builtin.path().is_dir()\n"
        "for command in COMMANDS.values():\n"
        "    assert importlib.util.find_spec(command.function.partition(':')[0]), command.name\n"
    )
    program = program.replace("assert cli.main(['--help']) == 0 and ", "cli.build_parser(); assert ")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "deploy" / "docker" / "healthcheck").stat().st_mode & stat.S_IXOTH


class Answers:
    """A worker whose health a script asks for."""

    text = ""

    def why_stuck(self) -> str:
        return self.text

    def why_not_ready(self) -> str:
        return self.text


@pytest.mark.processes
def test_the_health_check_follows_the_answer() -> None:
    def check(port: int) -> int:
        command = [str(DEPLOY / "docker" / "healthcheck"), str(port), "/health"]
        return subprocess.run(command, capture_output=True, check=False).returncode

    answers = Answers()
    with contextlib.closing(HealthServer("127.0.0.1", 0, answers)) as server:
        assert check(server.port) == 0
        answers.text = "hangs"
        assert check(server.port) == 1
        port = server.port
    assert check(port) == 1, "nothing listens"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert check(silent.getsockname()[1]) == 1, "nothing is said"


# -- compose ----------------------------------------------------------------------------------------------------------


def make_secrets(directory: Path, *arguments: str) -> Path:
    """Run make-secrets in ``directory``, with a copy of deploy/ there, and return that copy. No log may contain the
    keys."""
    folder = directory / "deploy"
    shutil.copytree(DEPLOY / "docker", folder / "docker")
    script = folder / "docker" / "make-secrets"
    script.write_text(script.read_text().replace('"$tandem"', "$tandem"))
    environment = os.environ | {"TANDEM": f"{sys.executable} -m deploy.cli", "PYTHONPATH": str(ROOT)}
    command = [str(script), *arguments]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in (directory / arguments[0] if arguments else folder / "secrets").iterdir():
        for line in path.read_text().replace("admin_api_key: ", "").splitlines():
            if len(line) > 20 and "{" not in line and " " not in line:
                register(line)
    again = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "is there already" in again.stderr
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files that make-secrets writes, in a copy of deploy/."""
    return make_secrets(tmp_path_factory.mktemp("compose"))


def interpolated(path: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Read a compose file as Docker does: merge keys applied, variables filled in."""

    def value(match: re.Match[str]) -> str:
        name, kind, word = match.groups()
        found = variables.get(name, "")
        assert found or kind != "?", f"{name} is needed"
        return found or (word if kind == "-" else "")

    loaded = yaml.safe_load(_VARIABLE.sub(value, path.read_text()))
    assert isinstance(loaded, dict)
    return loaded


def environment_file(made: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (made / ".env").read_text().splitlines())


@pytest.mark.processes
def test_secrets_are_private_and_what_compose_names(made: Path) -> None:
    compose = interpolated(DEPLOY / "compose.yaml", environment_file(made))
    files = {name: Path(each["file"]) for name, each in compose["secrets"].items()}
    assert set(files.values()) == set((made / "secrets").iterdir())
    for path in files.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    used = {name for service in compose["services"].values() for name in service.get("secrets", ())}
    assert used == files.keys()
    keys = files["api-keys.txt"].read_text().split()
    assert len(set(keys)) == 2 and files["prometheus.key"].read_text() == keys[1]
    assert environment_file(made)["RUN_AS"] == f"{os.getuid()}:{os.getgid()}"


@pytest.mark.processes
def test_secrets_in_another_folder_are_found_by_compose(tmp_path: Path) -> None:
    """Compose takes a relative path from the folder of its file, make-secrets from where it was started."""
    folder = make_secrets(tmp_path, "elsewhere")
    written = Path(environment_file(folder)["SECRETS"])
    assert written == tmp_path / "elsewhere" and (written / "coordinator.yaml").exists()


@pytest.mark.processes
@pytest.mark.parametrize("extra", [None, "compose.gpu.yaml"])
def test_compose_fits_the_specification(made: Path, extra: str | None) -> None:
    for name in ["compose.yaml", *([extra] if extra else [])]:
        loaded = interpolated(DEPLOY / name, environment_file(made))
        parsed = compose_spec.PyCompose.from_yaml(yaml.safe_dump(loaded))
        assert set(parsed.service_names()) == set(loaded["services"])
        loaded["services"]["pod"]["imagee"] = "x"
        with pytest.raises(ValueError, match="imagee"):
            compose_spec.PyCompose.from_yaml(yaml.safe_dump(loaded))


@pytest.mark.processes
@pytest.mark.parametrize("extra", [None, "compose.gpu.yaml"])
def test_services_are_what_the_command_line_and_each_other_expect(made: Path, extra: str | None) -> None:
    compose = interpolated(DEPLOY / "compose.yaml", environment_file(made))
    services = compose["services"]
    if extra:
        for name, change in interpolated(DEPLOY / extra, {})["services"].items():
            services[name] |= change
    ports = set()
    assert not services["pod"]["image"].startswith("tandem:"), (
        "an update would replace it, and the network of the others"
    )
    for name in "coordinator", "prefill", "decode":
        service = services[name]
        assert service["depends_on"] == {"pod": {"condition": "service_started", "restart": True}}
        mounts = {f"/run/secrets/{secret}": made / "secrets" / secret for secret in service["secrets"]}
        words = [inside(word, mounts) for word in service["command"]]
        environment = {key: value for key, value in service["environment"].items() if key.startswith("TANDEM_")}
        loaded = parsed(words, environment)
        assert not loaded.warnings
        config = loaded.config
        config.check_binds()
        assert service["network_mode"] == service["ipc"] == "service:pod", "KV goes through shared memory"
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and "/tmp" in service["tmpfs"][0]
        assert service["volumes"] == ["cache:/cache"]
        assert int(service["stop_grace_period"].removesuffix("s")) >= config.drain_timeout + 10
        _, script, port, path = service["healthcheck"]["test"]
        assert script == "/app/deploy/docker/healthcheck" and path == "/ready"
        if isinstance(config, CoordinatorConfig):
            assert config.admin_api_key and config.port == int(port)
            assert services["pod"]["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
        else:
            assert isinstance(config, WorkerConfig) and config.health_port == int(port)
            assert config.coordinator == "127.0.0.1:8001" and config.host == "127.0.0.1"
            assert config.device == ("auto" if extra is None else f"cuda:{['prefill', 'decode'].index(name)}")
        ports.add(port)
    assert len(ports) == 3, "all are in one network namespace"


@pytest.mark.processes
def test_prometheus_and_grafana_are_given_files_that_exist(made: Path) -> None:
    compose = interpolated(DEPLOY / "compose.yaml", environment_file(made))
    mounted = {}
    for name in "prometheus", "grafana":
        service = compose["services"][name]
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        for volume in service["volumes"]:
            source, target, mode = volume.split(":")
            assert mode == "ro" and (DEPLOY / source).exists(), source
            mounted[target] = DEPLOY / source
    scraped = yaml.safe_load(mounted["/etc/prometheus/prometheus.yaml"].read_text())
    for path in scraped["rule_files"]:
        assert inside(path, mounted) != path and Path(inside(path, mounted)).exists(), path
    (job,) = scraped["scrape_configs"]
    assert job["job_name"] == "tandem"
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert host in compose["services"]["pod"]["networks"]["default"]["aliases"] and port == "8000"
    assert job["authorization"]["credentials_file"] == "/run/secrets/prometheus.key"
    assert "prometheus.key" in compose["services"]["prometheus"]["secrets"]
    provisioning = mounted["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    variables = compose["services"]["grafana"]["environment"]
    assert source["url"] == "${PROMETHEUS_URL}" and variables["PROMETHEUS_URL"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tandem.yml").read_text())["providers"]
    assert provider["options"]["path"] in mounted and list(mounted[provider["options"]["path"]].glob("*.json"))
