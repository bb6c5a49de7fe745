"""What the tests of both engines' servers have in common."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from ultraep_serve.client.sidecar import Sidecar
from ultraep_serve.costs.model import CostModel
from ultraep_serve.demo.balanced_server import (
    BalancedServer,
    check_tokens,
    expert_parallel_flags,
    mixed_prompts,
)
from ultraep_serve.types import Policy

CONTEXT = 4096
PROMPTS = mixed_prompts(16)
# The models are so small that copying an expert may take longer than computing it.
MOVING_ALWAYS_PAYS = CostModel(
    seconds_per_assignment=1e-3, bytes_per_expert=1, link_bytes_per_second=1e12
)


def served(
    engine: str, model: Path, directory: Path, mode: str, dtype: str, *extra: str
) -> BalancedServer:
    """A server on two ranks that balances whatever its weights cost to move."""
    costs = directory / "costs.json"
    costs.write_text(MOVING_ALWAYS_PAYS.to_json())
    flags = [*expert_parallel_flags(mode, dtype, CONTEXT, engine), "--costs", str(costs), *extra]
    return BalancedServer(model, flags, directory / "server.log", engine=engine)


def balance(server: BalancedServer) -> dict[str, Any]:
    """What the sidecar says of all batches under quota."""
    with closing(Sidecar(server.sidecar_url, server.token)) as sidecar:
        return sidecar.balance(0, Policy.QUOTA)


def check_balanced(server: BalancedServer, num_layers: int) -> None:
    """Tokens stay the same, and every MoE layer was balanced meanwhile."""
    check = check_tokens(server, PROMPTS)
    assert check.identical == check.prompts == len(PROMPTS)
    summary = balance(server)
    assert [layer["layer"] for layer in summary["layers"]] == list(range(num_layers))
    for layer in summary["layers"]:
        assert layer["imbalance"]["before"]["max"] > 1.3
        assert layer["imbalance"]["after"]["max"] <= 1.02
    assert summary["bytes_moved"] > 0
    assert summary["batches"]["skipped"]["inconsistent"] == 0


@contextmanager
def two_hosts(
    engine: str, model: Path, directory: Path, shared: list[str], second_flags: list[str]
) -> Iterator[tuple[BalancedServer, BalancedServer]]:
    """A launcher for each of two hosts, both on this machine; the first one serves."""
    costs = directory / "costs.json"
    costs.write_text(MOVING_ALWAYS_PAYS.to_json())
    flags = [*shared, "--costs", str(costs), "--timeout-seconds", "20"]
    second = BalancedServer(
        model, [*flags, *second_flags], directory / "second.log", engine=engine, serves=False
    )
    with second, BalancedServer(model, flags, directory / "first.log", engine=engine) as first:
        yield first, second


def check_two_hosts(first: BalancedServer, second: BalancedServer, num_layers: int) -> None:
    """Tokens stay the same; both sidecars show the same balance, near its floor, and are ready."""
    for host in (first, second):
        assert httpx.get(f"{host.sidecar_url}/readyz").status_code == 200
    check = check_tokens(first, PROMPTS, concurrency=len(PROMPTS))  # fewer steps: they are slow
    assert check.identical == check.prompts == len(PROMPTS)
    seen = [balance(host) for host in (first, second)]
    assert [one["host_ranks"] for one in seen] == [[0, 1], [2, 3]]
    assert seen[0]["imbalance"] == seen[1]["imbalance"]
    for one in seen:
        assert (one["num_ranks"], len(one["layers"])) == (4, num_layers)
        assert one["batches"]["skipped"]["inconsistent"] == 0
        assert one["imbalance"]["before"]["mean"] > one["floor"] * 1.05
        assert 1.0 < one["floor"] <= one["imbalance"]["after"]["mean"] < one["floor"] * 1.03
        assert one["bytes_moved"] > 0
    refusal = httpx.post(
        f"{second.sidecar_url}/v1/control/policy",
        json={"policy": "off"},
        headers={"Authorization": f"Bearer {second.token}"},
    )
    assert refusal.status_code == 409
    assert "ask the sidecar there" in refusal.json()["detail"]


def refused(engine: str, *arguments: str) -> str:
    """stderr of a command that must fail at once."""
    command = [sys.executable, "-m", "ultraep_serve.cli", engine, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    return result.stderr
