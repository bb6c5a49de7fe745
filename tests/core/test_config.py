"""BalanceConfig: valid ranges, JSON, flags and the environment."""

import argparse
import json
import os
from pathlib import Path

import pytest

from ultraep_serve.config import (
    CONFIG_VARIABLE,
    BalanceConfig,
    SidecarSettings,
    child_environment,
    control_token_from_environment,
    parse_policy,
    share_with_ray_workers,
)
from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ConfigError, UltraEPError
from ultraep_serve.types import Policy


def test_json_and_back() -> None:
    config = BalanceConfig(policy=Policy.OFF, slots=5, relay="always", run_dir="/dev/shm/x")
    assert BalanceConfig.from_json(config.to_json()) == config
    assert "\n" not in config.to_json()
    assert BalanceConfig.from_json("{}") == BalanceConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slots", -1),
        ("slots", 65),
        ("min_batch_tokens", 0),
        ("max_imbalance", 0.99),
        ("max_imbalance", float("nan")),
        ("on_unsupported", "warn"),
        ("slot_memory", "shared"),
        ("relay", "yes"),
        ("chunk_bytes", 100),
        ("timeout_seconds", 0.0),
        ("ring_records", 15),
        ("policy", 1),
    ],
)
def test_bad_values_name_field_value_and_range(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} = .* must be "):
        BalanceConfig(**{field: value})


def test_wrong_answers_have_to_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="--allow-ideal"):
        BalanceConfig(policy=Policy.IDEAL)
    assert BalanceConfig(policy=Policy.IDEAL, allow_ideal=True).policy is Policy.IDEAL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"num_slots": 2}', "unknown setting 'num_slots'; choose from policy, slots"),
        ('{"policy": "fast"}', "must be 'off', 'quota', 'ideal' or"),
        ('{"slots": "2"}', "must be a whole number, 0 to 64"),
        ("[]", "JSON object"),
        (
            '{"speeds": "1.0,2"}',
            "speeds: '1.0,2' must be auto or equal, or one number per rank",
        ),
        ('{"speeds": 1}', "must be a valid string"),
    ],
)
def test_bad_json_is_a_config_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BalanceConfig.from_json(text)


def test_the_environment_carries_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    assert BalanceConfig.from_environment() is None
    config = BalanceConfig(min_batch_tokens=17)
    environment = child_environment(config, {})
    assert all(name in environment[CONFIG_VARIABLE] for name in BalanceConfig.model_fields)
    monkeypatch.setenv(CONFIG_VARIABLE, environment[CONFIG_VARIABLE])
    assert BalanceConfig.from_environment() == config


def test_what_the_operator_set_wins_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_OPERATOR", "mine")
    defaults = {"OF_THE_OPERATOR": "default", "NOT_SET": "default"}
    environment = child_environment(BalanceConfig(), defaults)
    assert environment["OF_THE_OPERATOR"] == "mine"
    assert environment["NOT_SET"] == "default"


def test_an_environment_can_leave_balancing_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "{}")
    environment = child_environment(None, {"NOT_SET": "default"})
    assert CONFIG_VARIABLE not in environment
    assert environment["NOT_SET"] == "default"


def test_the_control_token_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULTRAEP_CONTROL_TOKEN", "")
    assert control_token_from_environment() is None
    monkeypatch.setenv("ULTRAEP_CONTROL_TOKEN", "secret")
    assert control_token_from_environment() == "secret"


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
    monkeypatch.setenv(CONFIG_VARIABLE, '{"slots": 3, "sidecar": {"port": 8001}, "run_dir": "/x"}')
    assert BalanceConfig.chosen(None, "given") == chosen.replace(run_dir="/x")
    assert BalanceConfig.chosen(given, "given") == chosen.replace(run_dir="/x")
    with pytest.raises(ConfigError, match=f"given and the variable {CONFIG_VARIABLE}.* slots"):
        BalanceConfig.chosen({**given, "slots": 2}, "given")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"slotz": 1}, "unknown setting 'slotz'; choose from policy, slots"),
        ({"slots": "2"}, "slots = '2' must be a whole number"),
        ({"policy": "quotta"}, "policy = 'quotta' must be 'off', 'quota'"),
        ({"sidecar": {"prt": 1}}, "sidecar: unknown setting 'prt'; choose from host, port"),
        ({"sidecar": {"port": 70000}}, "port = 70000 must be 0 to 65535"),
        ([], "given must be a JSON object of settings"),
        (True, "given must be a JSON object of settings"),
    ],
)
def test_wrong_settings_are_named(
    given: object, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=error):
        BalanceConfig.chosen(given, "given")


def test_policies_by_name() -> None:
    assert [parse_policy(policy.value) for policy in Policy] == list(Policy)
    with pytest.raises(UltraEPError, match="unknown policy 'QUOTA'"):
        parse_policy("QUOTA")
    assert BalanceConfig().replace(policy=Policy.OFF).policy is Policy.OFF


def test_every_flag_arrives_with_its_type() -> None:
    parser = argparse.ArgumentParser()
    BalanceConfig.add_flags(parser)
    flags = "--policy eplb-slots --slots 3 --max-imbalance 2 --allow-ideal --relay never"
    config = BalanceConfig.from_flags(parser.parse_args(flags.split()))
    given = {"policy": Policy.EPLB_SLOTS, "slots": 3, "max_imbalance": 2.0, "relay": "never"}
    assert config == BalanceConfig(**given, allow_ideal=True)
    assert BalanceConfig.from_flags(parser.parse_args([])) == BalanceConfig()


def test_costs_come_as_a_file_or_as_they_are(tmp_path: Path) -> None:
    costs = CostModel(1e-6, bytes_per_expert=1 << 20, link_bytes_per_second=1e9)
    file = tmp_path / "costs.json"
    file.write_text(costs.to_json())
    for given in (str(file), costs.to_json(), json.loads(costs.to_json())):
        assert BalanceConfig(costs=given).costs == costs.to_json()
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
