"""BalanceConfig: legal ranges, JSON and the environment."""

from dataclasses import fields

import pytest

from ultraep_serve.config import (
    CONFIG_VARIABLE,
    BalanceConfig,
    child_environment,
    control_token_from_environment,
    parse_policy,
)
from ultraep_serve.errors import ConfigError, UltraEPError
from ultraep_serve.types import Policy


def test_json_and_back() -> None:
    config = BalanceConfig(
        policy=Policy.OFF, num_replica_slots=5, relay="always", run_dir="/dev/shm/x"
    )
    assert BalanceConfig.from_json(config.to_json()) == config
    assert "\n" not in config.to_json()
    assert BalanceConfig.from_json("{}") == BalanceConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_replica_slots", -1),
        ("num_replica_slots", 65),
        ("min_batch_tokens", 0),
        ("max_imbalance", 0.99),
        ("max_imbalance", float("nan")),
        ("on_unsupported", "warn"),
        ("slot_memory", "shared"),
        ("relay", "yes"),
        ("chunk_bytes", 100),
        ("timeout_seconds", 0.0),
        ("ring_records", 15),
        ("policy", "quota"),
    ],
)
def test_what_is_not_legal_names_field_value_and_range(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} = .* legal: "):
        BalanceConfig(**{field: value})  # type: ignore[arg-type]


def test_wrong_answers_have_to_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="--allow-ideal"):
        BalanceConfig(policy=Policy.IDEAL)
    assert BalanceConfig(policy=Policy.IDEAL, allow_ideal=True).policy is Policy.IDEAL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"slots": 2}', "unknown settings"),
        ('{"policy": "fast"}', "legal: off, quota, ideal"),
        ('{"num_replica_slots": "2"}', "wrong type"),
        ("[]", "JSON object"),
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
    assert all(field.name in environment[CONFIG_VARIABLE] for field in fields(config))
    monkeypatch.setenv(CONFIG_VARIABLE, environment[CONFIG_VARIABLE])
    assert BalanceConfig.from_environment() == config


def test_what_the_operator_set_wins_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_OPERATOR", "mine")
    defaults = {"OF_THE_OPERATOR": "default", "NOT_SET": "default"}
    environment = child_environment(BalanceConfig(), defaults)
    assert environment["OF_THE_OPERATOR"] == "mine"
    assert environment["NOT_SET"] == "default"


def test_the_control_token_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULTRAEP_CONTROL_TOKEN", "")
    assert control_token_from_environment() is None
    monkeypatch.setenv("ULTRAEP_CONTROL_TOKEN", "secret")
    assert control_token_from_environment() == "secret"


def test_a_run_directory_has_to_be_set() -> None:
    with pytest.raises(ConfigError, match="run_dir is empty"):
        _ = BalanceConfig().run_path


def test_policies_by_name() -> None:
    assert [parse_policy(policy.value) for policy in Policy] == list(Policy)
    with pytest.raises(UltraEPError, match="unknown policy 'QUOTA'"):
        parse_policy("QUOTA")
    assert BalanceConfig().with_policy(Policy.OFF).policy is Policy.OFF
