"""The files that others run: compose, systemd and Kubernetes. All are parsed, hold no secret, and
name what is there."""

import configparser
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import flows
from flows.cli.main import main

DEPLOYMENTS = Path(flows.__file__).parent.parent / "deployments"
UNITS = sorted((DEPLOYMENTS / "systemd").iterdir())
MANIFESTS = sorted((DEPLOYMENTS / "kubernetes").glob("*.yaml"))
SECRET = re.compile(
    r"(PASSWORD|AUTH_STRING|SECRET_KEY|TOKEN|DATABASE_CONNECTION_URL|BACKEND_STORE_URI)$"
)


COMPOSE = DEPLOYMENTS / "compose"
SERVICES = yaml.safe_load((COMPOSE / "compose.yaml").read_text(encoding="utf-8"))["services"]
EXAMPLE = (COMPOSE / ".env.example").read_text(encoding="utf-8")
OBJECTS = [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text("utf-8"))]


def of_kind(kind):
    return [one for one in OBJECTS if one["kind"] == kind]


# --- compose


def test_every_service_says_whether_it_is_well_and_starts_after_what_it_needs():
    assert set(SERVICES) == {"database", "prefect", "mlflow", "worker"}
    for name, service in SERVICES.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped"
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES and how == {"condition": "service_healthy"}
    assert set(SERVICES["worker"]["depends_on"]) == {"prefect", "mlflow"}


def test_ports_are_published_on_loopback_only():
    published = [str(port) for service in SERVICES.values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_no_secret_is_written_in_compose_and_each_must_be_given():
    needed = set()
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if SECRET.search(name):
                required = re.findall(r"\$\{(\w+):\?[^}]+\}", value)
                assert required, f"{name} is written, or may be empty"
                needed.update(required)
        assert not re.search("password|secret", str(service.get("command", [])), re.IGNORECASE)
    assert set(re.findall(r"^(\w+)=$", EXAMPLE, re.MULTILINE)) == needed


IMAGES = sorted(COMPOSE.glob("Dockerfile*"))


def instructions(path):
    """The instructions of a Dockerfile with what follows each. None of ours continues a line."""
    lines = path.read_text("utf-8").splitlines()
    return [
        (word, rest)
        for word, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")
    ]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_is_not_root_and_installs_what_there_is(path):
    steps = instructions(path)
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "USER", "ENV"}
    words = [word for word, _ in steps]
    assert words[0] == "FROM" and set(words) <= known and words.count("FROM") == 1
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", steps[0][1]), "a version, not latest"
    last = len(words) - 1 - words[::-1].index("RUN")
    assert steps[words.index("USER")] == ("USER", "concur") and words.index("USER") > last
    extras = set(dict(steps)["ARG"].removeprefix("EXTRAS=").split(","))
    project = tomllib.loads((DEPLOYMENTS.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert extras <= set(project["optional-dependencies"])
    (install,) = [rest for word, rest in steps if word == "RUN" and "constraints.txt" in rest]
    assert "--constraint constraints.txt" in install and install.endswith('".[${EXTRAS}]"')
    assert (DEPLOYMENTS.parent / "constraints.txt").is_file()


def test_the_images_are_one_for_each_kind_of_machine():
    texts = {path.name: path.read_text("utf-8") for path in IMAGES}
    assert set(texts) == {"Dockerfile", "Dockerfile.cuda"}
    assert "whl/cpu" in texts["Dockerfile"] and "-devel-" in texts["Dockerfile.cuda"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_docker_builds_an_image_that_answers(path):
    docker = shutil.which("docker")
    if not docker or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("needs a Docker daemon")
    tag = f"concur-test-{path.name.lower()}"
    build = [docker, "build", "--file", path, "--build-arg", "EXTRAS=", "--tag", tag, "."]
    done = subprocess.run(build, cwd=DEPLOYMENTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = subprocess.run([docker, "run", "--rm", tag, "concur", "--version"], capture_output=True)
    assert version("concur").encode() in said.stdout


def test_the_files_that_compose_names_are_there():
    assert (DEPLOYMENTS.parent / SERVICES["worker"]["build"]["dockerfile"]).is_file()
    for mount in SERVICES["database"]["volumes"]:
        assert not mount.startswith("./") or (COMPOSE / mount.split(":")[0]).is_file()


def test_docker_compose_reads_it(tmp_path):
    docker = shutil.which("docker")
    if not docker or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("needs docker's compose plugin")
    file = tmp_path / ".env"
    file.write_text(EXAMPLE.replace("=\n", "=letters-and-more\n"))
    files = ["--env-file", file, "--file", COMPOSE / "compose.yaml"]
    done = subprocess.run(
        [docker, "compose", *files, "config", "--quiet"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# --- systemd


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_one(path):
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(path)
    assert unit["Unit"]["Description"].startswith("concur")
    if path.suffix == ".service":
        words = unit["Service"]["ExecStart"].split()
        assert words[0].endswith("/concur") and words[1] in ("up", "status")
        known = {name for option in main.commands[words[1]].params for name in option.opts}
        assert {word for word in words if word.startswith("--")} <= known
        assert not SECRET.search(path.read_text())


def test_systemd_accepts_the_units(tmp_path):
    verify = shutil.which("systemd-analyze")
    if not verify:
        pytest.skip("needs systemd-analyze")
    program = tmp_path / "concur"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for path in UNITS:  # the checkout that they name is not on this machine
        text = re.sub(r"%h/concur/\.venv/bin/concur", str(program), path.read_text())
        (tmp_path / path.name).write_text(text)
    units = [str(tmp_path / path.name) for path in UNITS]
    done = subprocess.run(
        [verify, "verify", "--user", "--man=no", *units],
        capture_output=True,
        text=True,
        env={"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    said = [line for line in done.stderr.splitlines() if any(path.name in line for path in UNITS)]
    assert not said, done.stderr


# --- Kubernetes


def test_every_object_has_what_every_object_needs():
    needed = "Namespace Deployment Service NetworkPolicy PersistentVolumeClaim RayCluster"
    assert {one["kind"] for one in OBJECTS} >= set(needed.split())
    for one in OBJECTS:
        assert one["apiVersion"] and one["kind"] and one["metadata"]["name"]
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == "concur"
        assert one["kind"] != "Secret", "secrets are made by hand, from values that are in no file"


def pods():
    """Name -> specification of every pod of the manifests."""
    templates = {one["metadata"]["name"]: one["spec"]["template"] for one in of_kind("Deployment")}
    for one in of_kind("RayCluster"):
        templates["head"] = one["spec"]["headGroupSpec"]["template"]
        for group in one["spec"]["workerGroupSpecs"]:
            templates[group["groupName"]] = group["template"]
    return {name: template["spec"] for name, template in templates.items()}


def test_a_deployment_selects_its_own_pods():
    for one in of_kind("Deployment"):
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("name", pods(), ids="pod-{}".format)
def test_a_pod_names_volumes_that_are_there_and_takes_secrets_from_the_secret(name):
    pod = pods()[name]
    claims = {one["metadata"]["name"] for one in of_kind("PersistentVolumeClaim")}
    maps = {one["metadata"]["name"] for one in of_kind("ConfigMap")}
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    for volume in volumes.values():
        assert volume.get("persistentVolumeClaim", {}).get("claimName", *claims) in claims
        assert "configMap" not in volume or volume["configMap"]["name"] in maps
    for container in pod["containers"]:
        assert container["image"] and container["resources"]["limits"]["memory"]
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= set(volumes)
        for variable in container["env"]:
            if SECRET.search(variable["name"]):
                assert variable["valueFrom"]["secretKeyRef"]["name"] == "concur", variable["name"]
            assert ("value" in variable) != ("valueFrom" in variable)
            assert isinstance(variable.get("value", ""), str)
    assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False


def test_the_guide_makes_every_key_that_the_manifests_ask_for():
    asked = {
        variable["valueFrom"]["secretKeyRef"]["key"]
        for pod in pods().values()
        for container in pod["containers"]
        for variable in container["env"]
        if "valueFrom" in variable
    }
    guide = (DEPLOYMENTS.parent / "docs" / "how-to" / "kubernetes.md").read_text()
    assert asked == set(re.findall(r"--from-literal=([\w-]+)=", guide))


def test_the_ray_cluster_is_one_that_kuberay_takes():
    (cluster,) = of_kind("RayCluster")
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert spec["rayVersion"] == version("ray")
    head = spec["headGroupSpec"]
    assert head["template"]["spec"]["containers"][0]["name"] == "ray-head", "the first is Ray's"
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (head, *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_probes_and_services_ask_ports_that_the_containers_open():
    def opened(container):
        return {port["containerPort"] for port in container.get("ports", [])}

    for name, pod in pods().items():
        for container in pod["containers"]:
            for kind in {"readinessProbe", "startupProbe", "livenessProbe"} & container.keys():
                assert container[kind]["httpGet"]["port"] in opened(container), (name, kind)
    for one in of_kind("Service"):
        (container, *_) = pods()[one["spec"]["selector"]["app"]]["containers"]
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= opened(container)
