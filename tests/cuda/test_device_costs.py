"""How experts are timed on a device when a server starts; no GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="the device's backend launches kernels written in Triton")

from ultraep_serve.balance.cuda import timing
from ultraep_serve.balance.cuda.timing import device_seconds


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
