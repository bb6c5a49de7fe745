"""Dockerfiles and Compose: linted, valid, closed to other hosts, and true to what they package."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from files import BIN, COMPOSE, COMPOSE_GPUS, DEPLOY, ROOT, read_yaml, run

from ultraep_serve.system.versions import SGLANG, VLLM, Package

DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("package", [VLLM, SGLANG], ids=lambda package: package.name)
def test_engines_have_one_release_wherever_an_image_is_named(package: Package) -> None:
    """Dockerfiles, manifests and pages name the newest one of the table."""
    repository = {"vllm": "vllm/vllm-openai", "sglang": "lmsysorg/sglang"}[package.name]
    image = re.compile(rf"(?:{repository}|\b{package.name}-ultraep):v([\w.]*\w)")
    files = [*DEPLOY.rglob("*.Dockerfile"), *DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.md")]
    files += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {path: {*image.findall(path.read_text())} for path in files}
    named = {path: releases for path, releases in named.items() if releases}
    assert {path.name for path in named} >= {f"{package.name}.Dockerfile", "recipes.md"}
    newest = package.releases[-1].replace("*", "0")
    assert named == {path: {newest} for path in named}
    recipes = (ROOT / "docs" / "recipes.md").read_text()
    if package is VLLM:  # an overlay and a chart name the tag by itself
        assert {*re.findall(r"\b(?:newTag|tag): v(\S+)", recipes)} == {newest}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfiles_are_linted(path: Path) -> None:
    run(BIN / "hadolint", "--config", DEPLOY / "docker" / "hadolint.yaml", path)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_is_copied_exists_and_is_not_ignored(path: Path) -> None:
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for line in re.findall(r"^COPY (.+)$", path.read_text(), re.MULTILINE):
        *sources, _ = shlex.split(line)
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(Path(source).is_relative_to(each) for each in allowed), source


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_run_as_nobody_special(path: Path) -> None:
    assert "useradd --uid 10001" in path.read_text()
    assert re.search(r"^USER 10001$", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_health_checks_ask_the_ports_that_are_exposed(path: Path) -> None:
    text = path.read_text()
    (command,) = re.findall(r"^HEALTHCHECK .*\n +CMD (.+)$", text, re.MULTILINE)
    *python, code = json.loads(command)
    assert python in (["python", "-S", "-c"], ["python3", "-S", "-c"])
    compile(code, str(path), "exec")
    (exposed,) = re.findall(r"^EXPOSE (.+)$", text, re.MULTILINE)
    assert all(port in code for port in exposed.split())


def test_images_for_cpu_were_built_and_serve() -> None:
    result = ROOT / "benchmarks" / "results" / "images.json"
    found = json.loads(result.read_text())
    names = {image["name"] for image in found["images"]}
    assert names == {run["image"] for run in found["runs"]} >= {"vllm-cpu", "sglang-cpu"}
    assert all(row["is_right"] for run in found["runs"] for row in run["checks"])
    bases = {
        f"{name}.Dockerfile": _base(DEPLOY / "docker" / f"{name}.Dockerfile") for name in names
    }
    built = {f"{image['name']}.Dockerfile": image["base"] for image in found["images"]}
    assert built == bases, "run `make images`: these bases are not those that were built on"
    served = {run["image"] for run in found["runs"] if "SIGTERM ends it" in str(run)}
    assert served == {"vllm-cpu", "sglang-cpu"}


def _base(path: Path) -> str:
    (name,) = re.findall(r"^FROM (\S+)$", path.read_text(), re.MULTILINE)
    return str(name)


def test_compose_follows_its_schema() -> None:
    run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE, COMPOSE_GPUS)


def test_compose_with_gpus_differs_from_compose_as_its_image_and_gpus_do() -> None:
    """Prometheus and Grafana are those of the other file, and the engine is as closed."""
    services, others = (read_yaml(path)["services"] for path in (COMPOSE, COMPOSE_GPUS))
    assert others.keys() == services.keys()
    for name in services.keys() - {"engine"}:
        assert others[name] == {"extends": {"file": COMPOSE.name, "service": name}}
    engine, other = services["engine"], others["engine"]
    assert {
        name for name in engine.keys() | other.keys() if engine.get(name) != other.get(name)
    } == {*("build", "command", "cpuset", "deploy", "image", "shm_size", "ulimits")}
    (devices,) = other["deploy"]["resources"]["reservations"]["devices"]
    flag = f"--tensor-parallel-size={devices['count']}"
    assert {*engine["command"]} ^ {*other["command"]} == {"--tensor-parallel-size=2", flag}
    assert read_yaml(COMPOSE_GPUS)["volumes"] == read_yaml(COMPOSE)["volumes"]


def test_compose_opens_ports_to_this_host_alone() -> None:
    ports = [port for service in _services().values() for port in service["ports"]]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_gives_the_engine_shared_memory_and_every_service_a_health_check() -> None:
    services = _services()
    assert services["engine"]["shm_size"] == "2gb"
    without = {name for name, service in services.items() if "healthcheck" not in service}
    assert without == {"engine"}  # which has its image's, of the ports that it opens
    image = (DEPLOY / "docker" / "vllm-cpu.Dockerfile").read_text()
    assert services["engine"]["build"]["dockerfile"] == "deploy/docker/vllm-cpu.Dockerfile"
    for port in services["engine"]["ports"]:
        assert "127.0.0.1:{end}" in image
        assert f"'{port.rpartition(':')[2]}/" in image


def test_files_that_compose_mounts_exist() -> None:
    for service in _services().values():
        for volume in service["volumes"]:
            if isinstance(volume, str) and volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists(), volume


def test_every_setting_of_compose_is_in_the_example() -> None:
    named = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    example = (DEPLOY / "env.example").read_text()
    assert set(re.findall(r"^(\w+)=", example, re.MULTILINE)) == named


def _services() -> dict[str, Any]:
    services: dict[str, Any] = read_yaml(COMPOSE)["services"]
    return services
