"""How SGLang's server is started on CPUs; SGLang itself is not needed."""

import json
from pathlib import Path

import pytest

from ultraep_serve.engines.sglang import launch
from ultraep_serve.types import Policy

TWO_RANKS = ["--device", "cpu", "--tp-size", "2", "--ep-size", "2"]


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [([], 40960), (["--context-length", "2048"], 32768), (["--max-total-tokens", "7"], None)],
)
def test_the_cache_holds_a_request_as_long_as_the_models_context(
    flags: list[str], tokens: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    monkeypatch.setattr("ultraep_serve.engines.common.launch.find_library", "lib{}.so".format)
    config = {"num_experts": 8, "text_config": {"max_position_embeddings": 40960}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = launch.engine_command(str(tmp_path), [*TWO_RANKS, *flags], Policy.QUOTA)
    assert command.environment["LD_PRELOAD"] == "libtcmalloc_minimal.so"
    if tokens is None:
        assert command.arguments.count("--max-total-tokens") == 1
        assert not command.said
    else:
        chosen = command.arguments[command.arguments.index("--max-total-tokens") + 1]
        assert chosen == str(tokens)
        assert f"KV cache of {tokens} tokens" in command.said[0]
