"""Runs for the sidecar's tests, and what a client reads of its answers."""

from pathlib import Path

import httpx
import numpy as np
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from tests.support.ring_files import create, write_all
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.types import Decision, ExpertShape, Policy

TOKEN = "open-sesame"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class SkewedRun:
    """Recorders of a small run; every rank writes the same loads, rank r sends r * 100 bytes."""

    def __init__(self, run_path: Path, num_ranks: int = 2, ring_records: int = 256) -> None:
        self.num_ranks = num_ranks
        self.control = ControlPage.create(run_path, Policy.QUOTA)
        shape = ExpertShape(num_ranks, 4 * num_ranks, 1)
        self.recorders = [
            create(
                run_path,
                shape=shape,
                rank=rank,
                num_layers=2,
                ring_records=ring_records,
                slot_bytes=1 << 20,
            )
            for rank in range(num_ranks)
        ]
        for recorder in self.recorders:
            recorder.set_state(RingState.READY)

    def batch(
        self,
        number: int,
        decision: Decision = Decision.PLANNED,
        policy: Policy = Policy.QUOTA,
        hot: int = 0,
    ) -> None:
        """Two layers, all assignments on rank ``hot`` before, even after."""
        before = np.zeros(self.num_ranks)
        before[hot] = 10 * self.num_ranks
        loads = {"load_before": before, "load_after": np.full(self.num_ranks, 10)}
        of_batch = {"decision": decision, "policy": policy, "stage_ns": [1000] * 7}
        layers = np.arange(2)
        write_all(self.recorders, number, layers, bytes_received=50, **of_batch, **loads)

    def skip(self, decision: Decision) -> None:
        for recorder in self.recorders:
            recorder.count_batch(decision)

    def close(self) -> None:
        for recorder in self.recorders:
            recorder.close()
        self.control.close()


def status(url: str) -> int:
    """Of the answer to a GET; 0 while nobody listens, and where it ends before it answers."""
    try:
        return httpx.get(url, timeout=30).status_code
    except httpx.TransportError:
        return 0


def reasons(client: TestClient) -> dict[str, str]:
    answer = client.get("/readyz")
    assert answer.status_code == (503 if answer.json()["reasons"] else 200)
    found: dict[str, str] = answer.json()["reasons"]
    return found


def samples(client: httpx.Client, path: str = "/metrics") -> dict[str, float]:
    """Sample values by name and labels, as a scraper reads them."""
    text = client.get(path).text
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
