"""How experts are timed on a device when a server starts; no GPU."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the device's backend launches kernels written in Triton")

from ultraep_serve.balance.cuda import timing
from ultraep_serve.balance.cuda.timing import device_seconds
from ultraep_serve.engines.common.group import LoadedLayers, _run_first_layer
from ultraep_serve.types import ExpertShape, TokenView


def test_repetitions_follow_each_other_and_nobody_waits_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []

    class Mark:
        def record(self) -> None:
            did.append("mark")

        def synchronize(self) -> None:
            did.append("wait")

        def elapsed_time(self, _end: "Mark") -> float:
            return 0.0  # shorter than an event's clock can tell

    monkeypatch.setattr(timing, "new_mark", lambda _device: Mark())
    seconds = device_seconds(torch.device("cpu"), lambda: did.append("launch"))
    assert did == ["launch", "mark"] * (len(did) // 2) + ["wait"]
    assert len(did) > 9
    assert seconds > 0


def test_everything_that_is_timed_is_made_on_the_device() -> None:
    given: list[torch.Tensor] = []

    class Execution:
        def compute(self, _layer: Any, *tensors: torch.Tensor) -> torch.Tensor:
            given.extend(tensors)
            return tensors[0]

    device = torch.device("meta")  # has no values: a copy from the host would show
    loaded = LoadedLayers(
        layers=[torch.nn.Module()],
        parameters=[[torch.nn.Parameter(torch.ones(1, device=device))]],
        shared=[],
        shape=ExpertShape(2, 8, 1),
        view=TokenView.OWN,
        experts_per_token=2,
        hidden_size=16,
        dtype=torch.float32,
    )
    execution: Any = Execution()
    for _ in range(2):
        _run_first_layer(execution, loaded, 4096)
    assert {tensor.device for tensor in given} == {device}
    assert given[0].shape == (2048, 16)
    assert given[2] is given[5], "ids are made once for all repetitions"
