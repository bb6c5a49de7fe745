"""The page of recipes: every command is parsed by who takes it, every file follows its schema."""

import argparse
import json
import re
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import jsonschema
import pytest
import yaml
from commands import ENGINES, INTERPRETERS, accepts, check_parallelism, read_flags
from files import BIN, DEPLOY, run
from manifests import only
from recipes import Start, as_flags, blocks, commands, starts, values

from ultraep_serve import __version__
from ultraep_serve.cli import status
from ultraep_serve.config import BalanceConfig
from ultraep_serve.launcher.guard import setting_on_command_line
from ultraep_serve.system.versions import SGLANG, VLLM, Package
from ultraep_serve.types import Policy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own use of pydantic
    from deploy import ray_serve

PARSERS = {"vllm": "vllm", "vllm-engine": "vllm", "sglang": "sglang"}  # and whose it is
STARTS = starts()
CHECKED_ELSEWHERE = {"find", "aiperf"}  # of llm-d's own script; not installed here
every = pytest.mark.parametrize(
    "start", STARTS, ids=[f"{number}-{start.engine}" for number, start in enumerate(STARTS)]
)


def program(*names: str) -> list[list[str]]:
    """The words behind ``names`` of all commands that begin with them."""
    lines = [command.words for command in commands()]
    return [line[len(names) :] for line in lines if line[: len(names)] == list(names)]


def config_of(start: Start) -> BalanceConfig:
    """The settings that the engine finds: in the one place or in the other."""
    given = setting_on_command_line(start.flags)
    text = start.variables.get("ULTRAEP_CONFIG")
    assert (given is None) != (text is None)
    config = BalanceConfig.from_json(text) if text else BalanceConfig.chosen(given, "ultraep")
    assert config is not None
    return config


def is_for_cpu(start: Start) -> bool:
    return any("CPU" in name for name in start.variables)


def test_no_command_is_left_unchecked() -> None:
    assert len(STARTS) == 11
    for block in blocks("sh"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    modules = {"pip", "vllm.entrypoints.openai.api_server", "dynamo.vllm", "sglang.launch_server"}
    others = {
        "exec",
        "curl",
        "docker",
        "serve",
        "ultraep-serve",
        "lm_eval",
        "vllm",
        *CHECKED_ELSEWHERE,
    }
    for command in commands():
        first, *rest = command.words
        assert first in others or (first.startswith("python") and rest[1] in modules), first


@pytest.mark.parametrize("parser", PARSERS)
def test_engines_take_the_flags(parser: str) -> None:
    engine = PARSERS[parser]
    lines = [start.flags for start in STARTS if start.parser == parser]
    lines += [as_flags({"model": "MODEL", **ray_serve.ENGINE})] if parser == "vllm-engine" else []
    assert len(lines) >= 3
    if not INTERPRETERS[engine].exists():
        pytest.skip(f"{INTERPRETERS[engine]} is missing: `make setup-{engine}`")
    done = accepts(engine, lines, parser)
    assert done.returncode == 0, done.stderr


def test_vllms_load_generator_takes_its_flags() -> None:
    done = accepts("vllm", program("vllm", "bench", "serve"), "vllm-bench")
    assert done.returncode == 0, done.stderr


@every
def test_every_engine_is_asked_to_balance_and_can(start: Start) -> None:
    config = config_of(start)
    assert config.policy is Policy.QUOTA
    flags = read_flags(start.engine, start.flags)
    check_parallelism(start.engine, flags)
    if start.ports:
        assert config.sidecar is not None
        assert config.sidecar.host == "0.0.0.0"
        ports = [int(port.rpartition(":")[2]) for port in start.ports]
        assert ports == [flags.port, config.sidecar.port]


@every
def test_nothing_is_missing_that_the_launcher_would_add(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = ENGINES[start.engine]
    flags = read_flags(start.engine, start.flags)
    if start.engine == "sglang" and not is_for_cpu(start):
        assert launch._gpu_flags(flags, Policy.QUOTA) == []
    if not is_for_cpu(start):
        return
    monkeypatch.setattr(launch, "cores_of_ranks", lambda num_ranks: [[0], [1]])
    monkeypatch.setattr("os.environ", start.variables)
    if start.engine == "sglang":
        assert launch._cpu_flags(flags) == []
        needed, _ = launch._on_cpu(flags)
    else:
        added, needed, _ = launch._on_cpu(flags, 2)
        assert added == []
    assert {*needed} <= {*start.variables}


@pytest.mark.parametrize("package", [VLLM, SGLANG], ids=lambda package: package.name)
def test_images_are_tagged_with_their_release_and_linted(package: Package, tmp_path: Path) -> None:
    (text,) = (text for text in blocks("dockerfile") if f"[{package.name},cuda]" in text)
    (release,) = re.findall(r"^FROM \S+:v(\S+)$", text, re.MULTILINE)
    (file, tag) = (f"{package.name}.Dockerfile", f"{package.name}-ultraep:v{release}")
    assert ["-f", file, "-t", tag, "dist"] in program("docker", "build")
    assert any(tag in line for line in program("docker", "run"))
    (tmp_path / file).write_text(text)
    run(BIN / "hadolint", "--config", DEPLOY / "docker" / "hadolint.yaml", tmp_path / file)


def test_the_wheel_is_the_one_that_is_built_and_pip_takes_the_commands() -> None:
    installs = program("python3", "-m", "pip")
    text = "".join([*blocks("dockerfile"), *map(str, installs)])
    wheels = re.findall(r"/dist/(\S+\.whl)\[(\S+?)\]", text)
    assert len(wheels) == 3
    offered = {*metadata.metadata("ultraep-serve").get_all("Provides-Extra")}
    for wheel, extras in wheels:
        assert wheel == f"ultraep_serve-{__version__}-py3-none-any.whl"
        assert {*extras.split(",")} <= offered
    code = (
        "import sys; from pip._internal.commands import create_command;"
        "create_command(sys.argv[1]).parse_args(sys.argv[2:])"
    )
    for words in installs:
        run(sys.executable, "-c", code, *words)


def test_the_overlay_puts_image_and_setting_into_llm_ds_groups(tmp_path: Path) -> None:
    """Groups as llm-d has them: names, containers, a script that starts vLLM."""
    (text,) = (block for block in blocks("yaml") if block.startswith("# kustomization.yaml"))
    guide = tmp_path / "llm-d-guide"
    guide.mkdir()
    (tmp_path / "kustomization.yaml").write_text(text)
    (guide / "kustomization.yaml").write_text("resources: [prefill.yaml, decode.yaml]\n")
    for role in ("prefill", "decode"):
        container = {
            "name": "vllm",
            "image": "vllm/vllm-openai:v0.32.0",
            "command": ["/bin/bash", "-c"],
            "args": ["exec vllm serve MODEL --enable-expert-parallel"],
            "env": [{"name": "DP_SIZE_LOCAL", "value": "8"}],
        }
        template = {"spec": {"containers": [container]}}
        group = {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": f"wide-ep-{role}"},
            "spec": {"leaderWorkerTemplate": {"size": 2, "workerTemplate": template}},
        }
        (guide / f"{role}.yaml").write_text(yaml.safe_dump(group))
    built = list(yaml.safe_load_all(run(BIN / "kubectl", "kustomize", tmp_path)))
    found = {}
    for role in ("prefill", "decode"):
        group = only(built, "LeaderWorkerSet", f"wide-ep-{role}")
        template = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        (container,) = template["spec"]["containers"]
        newest = VLLM.releases[-1].replace("*", "0")
        assert container["image"] == f"registry.example.com/vllm-ultraep:v{newest}"
        found[role] = {entry["name"]: entry["value"] for entry in container["env"]}
    assert {*found["decode"]} == {"DP_SIZE_LOCAL"}
    config = BalanceConfig.from_json(found["prefill"]["ULTRAEP_CONFIG"])
    assert config.sidecar is not None


def test_values_of_the_production_stack_follow_their_schema() -> None:
    """The chart's own schema allows unknown names; this one has those that the recipe uses."""
    schema = json.loads((DEPLOY / "tests" / "vllm-stack.schema.json").read_text())
    jsonschema.validate(values(), schema)


def test_ray_serve_takes_the_command_and_deploys_two_replicas() -> None:
    cli = pytest.importorskip("ray.serve.scripts", reason="not in this environment")
    ((*words,),) = program("serve", "run")
    parsed = cli.run.make_context("run", words).params
    assert parsed["config_or_import_path"] == "deploy.ray_serve:app"
    options = ray_serve.Options(**dict(word.split("=") for word in parsed["arguments"]))
    deployment = ray_serve.app(options)._bound_deployment
    assert deployment.num_replicas == 2
    assert deployment.ray_actor_options == {"num_cpus": 1, "num_gpus": options.gpus}
    assert deployment.init_kwargs == {"tensor_parallel_size": options.gpus}
    config = BalanceConfig(**ray_serve.ENGINE["additional_config"]["ultraep"])
    assert config.policy is Policy.QUOTA


def test_our_own_commands_are_taken() -> None:
    parser = argparse.ArgumentParser()
    status.add_arguments(parser)
    lines = program("ultraep-serve", "status")
    assert len(lines) == len(program("ultraep-serve")) == 1
    parser.parse_args(lines[0])
