"""BalanceConfig: valid ranges, JSON, flags and the environment."""

import argparse
import json
import os
from pathlib import Path

import pytest

from ultraep_serve.config import (
    BalanceConfig,
    SidecarSettings,
    add_file_flag,
    given_settings,
)
from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.environment import (
    CONFIG_VARIABLE,
    child_environment,
    share_with_ray_workers,
)
from ultraep_serve.types import Policy


def test_the_environment_carries_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    assert BalanceConfig.from_environment() is None
    config = BalanceConfig(min_batch_tokens=17)
    environment = child_environment(config.to_json(), {})
    assert all(name in environment[CONFIG_VARIABLE] for name in BalanceConfig.model_fields)
    monkeypatch.setenv(CONFIG_VARIABLE, environment[CONFIG_VARIABLE])
    assert BalanceConfig.from_environment() == config
    monkeypatch.setenv(CONFIG_VARIABLE, "{")
    with pytest.raises(ConfigError, match="not JSON"):
        BalanceConfig.from_environment()


def test_what_the_operator_set_wins_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_OPERATOR", "mine")
    monkeypatch.setenv(CONFIG_VARIABLE, "{}")
    defaults = {"OF_THE_OPERATOR": "default", "NOT_SET": "default"}
    environment = child_environment(None, defaults)  # with balancing switched off
    assert CONFIG_VARIABLE not in environment
    assert environment["OF_THE_OPERATOR"] == "mine"
    assert environment["NOT_SET"] == "default"


def test_settings_come_from_the_engines_own_configuration_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    assert BalanceConfig.chosen(None, "given") is None
    assert BalanceConfig.chosen({}, "given") == BalanceConfig()
    given = {"slots": 3, "sidecar": {"port": 8001}}
    chosen = BalanceConfig.chosen(given, "given")
    assert chosen is not None
    assert chosen.slots == 3
    assert chosen.sidecar == SidecarSettings(port=8001)
    monkeypatch.setenv(CONFIG_VARIABLE, json.dumps(given))
    assert BalanceConfig.chosen(None, "given") == chosen
    assert BalanceConfig.chosen(given, "given") == chosen
    with pytest.raises(ConfigError, match=f"given and the variable {CONFIG_VARIABLE}.* slots"):
        BalanceConfig.chosen({**given, "slots": 2}, "given")


def test_costs_come_as_a_file_or_as_they_are(tmp_path: Path) -> None:
    costs = CostModel(1e-6, bytes_per_expert=1 << 20, link_bytes_per_second=1e9)
    file = tmp_path / "costs.json"
    file.write_text(costs.to_json())
    for given in (str(file), costs.to_json(), json.loads(costs.to_json())):
        assert BalanceConfig(costs=given).costs == costs
    for given, message in ((str(tmp_path), "cannot be read"), ({"x": 1}, "unknown costs")):
        with pytest.raises(ConfigError, match=f"costs: .*{message}"):
            BalanceConfig(costs=given)


def test_settings_reach_ray_workers_by_vllms_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.setenv(name, "OWN")
    share_with_ray_workers()
    assert os.environ[name] == "OWN"
    monkeypatch.setenv(CONFIG_VARIABLE, "{}")
    share_with_ray_workers()
    share_with_ray_workers()
    assert os.environ[name] == f"OWN,{CONFIG_VARIABLE}"


YAML = """
policy: off
min_batch_tokens: 17
speeds: 1.0,0.6
costs: {seconds_per_assignment: 1.0e-6, bytes_per_expert: 1048576, link_bytes_per_second: 1.0e+9}
sidecar: {port: 8005, host: 127.0.0.2}
"""


ALIASES = "a0: &a0 x\n" + "".join(  # 9 ** 8 times the same
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


def of_file(path: Path, *flags: str) -> tuple[BalanceConfig, SidecarSettings]:
    parser = argparse.ArgumentParser()
    add_file_flag(parser)
    BalanceConfig.add_flags(parser)
    SidecarSettings.add_flags(parser, "sidecar-")
    return given_settings(parser.parse_args([*flags, "--ultraep-config", str(path)]), "sidecar-")


def test_flags_override_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(YAML)
    config, sidecar = of_file(file)
    assert (config.policy, config.min_batch_tokens, config.speeds) == (Policy.OFF, 17, "1.0,0.6")
    assert config.costs.bytes_per_expert == 1 << 20
    assert sidecar == SidecarSettings(port=8005, host="127.0.0.2")
    config, sidecar = of_file(file, "--policy", "quota", "--slots", "3", "--sidecar-port", "9000")
    assert (config.policy, config.slots, config.min_batch_tokens) == (Policy.QUOTA, 3, 17)
    assert sidecar == SidecarSettings(port=9000, host="127.0.0.2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slotz: 1", "unknown setting 'slotz'; choose from policy, slots"),
        ("slots: 65", "slots = 65 must be 0 to 64"),
        ("max_imbalance: .nan", "max_imbalance = nan must be "),
        ("timeout_seconds: 0", "timeout_seconds = 0 must be "),
        ("policy: 1", "policy = 1 must be "),
        ("slots: two", "slots = 'two' must be a whole number"),
        ("sidecar: {prt: 1}", "unknown setting 'prt'; choose from host, port"),
        ("sidecar: [1]", "sidecar must hold settings by name"),
        ("- slots", "must hold settings by name"),
        ("1: 2", "must hold settings by name"),
        ("", "must hold settings by name"),
        ("slots: [", "is not YAML"),
        ("[" * 100_000, "is not YAML"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
        ("policy: ideal", "--allow-ideal"),
        ("slots: 1\nslots: 2", "'slots' is given twice"),
        ("sidecar: {port: 1, port: 2}", "'port' is given twice"),
        ('{"slots": 1, "sidecar": {"port": 1, "port": 2}}', "'port' is given twice"),
        ("sidecar: &a {port: 1}\ncosts: *a", "an alias"),
        (ALIASES, "an alias"),
    ],
)
def test_a_wrong_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / f"settings.{'json' if text.startswith('{') else 'yaml'}"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        of_file(file)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["settings.yaml", "settings.json"])
def test_a_byte_order_mark_is_no_part_of_a_file(name: str, tmp_path: Path) -> None:
    """Some editors begin every file with one."""
    (tmp_path / name).write_text('{"slots": 3}', encoding="utf-8-sig")
    assert of_file(tmp_path / name)[0].slots == 3


def test_a_pipe_is_no_file_of_settings(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        of_file(tmp_path / "pipe")


def test_the_variable_may_name_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes that this one starts get what the file held, wherever they run."""
    file = tmp_path / "settings.yaml"
    file.write_text("slots: 3\nsidecar: {port: 8001}")
    monkeypatch.setenv(CONFIG_VARIABLE, f"@{file}")
    config = BalanceConfig.from_environment()
    assert config == BalanceConfig(slots=3, sidecar=SidecarSettings(port=8001))
    file.unlink()
    assert BalanceConfig.from_environment() == config


def test_a_mistake_is_named_by_its_flag() -> None:
    parser = argparse.ArgumentParser()
    BalanceConfig.add_flags(parser)
    for words, message in (
        ("--max-imbalance 0.5", "--max-imbalance = 0.5 must be 1 to 1000000"),
        ("--slots many", "--slots = many must be a whole number, 0 to 64"),
        ("--slot-memory x", "--slot-memory = x must be 'auto', 'per_layer' or 'shared'"),
        ("--speeds 2", "--speeds: '2' must be auto or equal"),
    ):
        with pytest.raises(ConfigError, match=message):
            BalanceConfig.from_flags(parser.parse_args(words.split()))


@pytest.mark.parametrize("server", [8000, 8100, 8200, 30000])
def test_the_sidecars_port_is_none_of_the_engines(server: int) -> None:
    """vLLM with a port for each rank; SGLang's own and those of its data-parallel ranks."""
    ranks = 72  # of a rack
    vllm = {*range(server, server + ranks), 9256, 29500, 29501, 29550, 5557, 14579, 8998}
    side_channels = {*range(5600, 5600 + ranks), *range(5710, 5710 + ranks)}
    sglang = {server + 1, server + 13, *range(server + 233, server + 240 + ranks), 29000, 9003}
    assert SidecarSettings().port_beside(server) not in vllm | side_channels | sglang
    neighbours = {first + rank for first in (8000, 8100, 8200, 30000) for rank in range(ranks)}
    assert SidecarSettings().port_beside(server) not in neighbours
    assert SidecarSettings(port=9000).port_beside(server) == 9000


def test_an_engine_that_is_tried_is_checked() -> None:
    BalanceConfig(on_newer_engine="try")
    with pytest.raises(ConfigError, match="'try' needs a self-check"):
        BalanceConfig(on_newer_engine="try", self_check="off")
