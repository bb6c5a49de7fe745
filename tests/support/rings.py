"""A run without an engine: rings that look like those of a server under load.

    python -m tests.support.rings RUN_DIR

All values are made up except the plans, which are the real planner's for made-up loads.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.contract import FULL_SPEED

from ultraep_serve.config import BalanceConfig
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.system.topology import ONLY_STAGE, Location, PipelineStage
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.record import LayerRecord
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_directory import RunDirectory, name_of_run
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape, Plan, Policy, Stage

PLANNED_LAYERS = 3
_EXPERT_BYTES = 3 << 20
_NS_PER_ASSIGNMENT = 900  # of the engine's part
_NS_PER_BYTE = 0.05


@contextmanager
def run_directory() -> Iterator[Path]:
    """One that this process holds."""
    directory = RunDirectory.create(name_of_run(os.getpid(), 0))
    RunFiles(directory.path).write_config(BalanceConfig().to_json())
    try:
        yield directory.path
    finally:
        directory.leave()


@dataclass(frozen=True)
class SyntheticTraffic:
    """What the made-up batches are like."""

    tokens: int = 8192  # of a prefill batch, over all ranks
    experts_per_token: int = 8
    skew: float = 0.9  # exponent of the popularity of experts; 0: all alike
    drift: float = 0.02  # how fast popularity wanders from batch to batch
    balanced_share: float = 0.1  # of layers whose load is even already
    decode_batches: int = 5  # per prefill batch
    speeds: tuple[int, ...] | None = None  # of the ranks, of FULL_SPEED; None: all equal


class SyntheticRun:
    """The rings, control page and configuration of a run, written by this process."""

    def __init__(
        self,
        run_path: Path,
        shape: ExpertShape,
        num_layers: int,
        traffic: SyntheticTraffic | None = None,
        *,
        ring_records: int = 4096,
        seed: int = 0,
        pipeline: PipelineStage = ONLY_STAGE,
    ) -> None:
        """Create everything in ``run_path`` (which exists), every rank ready.

        Further stages of a pipeline are runs of their own in the same ``run_path``.
        """
        self.shape, self.num_layers = shape, num_layers
        self.traffic = traffic or SyntheticTraffic()
        self._random = np.random.default_rng(seed)
        self._batch = 0
        self._popularity = self._random.normal(size=(num_layers, shape.num_logical_experts))
        self.control = ControlPage.create(run_path, Policy.QUOTA)
        config = BalanceConfig(slots=shape.num_replica_slots)
        (run_path / "config.json").write_text(config.to_json())
        slot_bytes = shape.num_replica_slots * _EXPERT_BYTES
        self.recorders = [
            Recorder.create(
                run_path,
                Location.on_one_host(rank, shape.num_ranks),
                shape,
                pipeline,
                num_layers=num_layers,
                engine="vllm",
                mode="data",
                slot_bytes=slot_bytes,
                ring_records=ring_records,
            )
            for rank in range(shape.num_ranks)
        ]
        for recorder in self.recorders:
            recorder.set_state(RingState.READY)
            recorder.set_policy(Policy.QUOTA)
        self.recorders[0].watch(self.control.file)

    def batch(self) -> None:
        """One prefill batch under the policy in force, and some decode batches."""
        self._batch += 1
        policy = self.control.policy
        for recorder in self.recorders:
            for _ in range(self.traffic.decode_batches):
                recorder.count_batch(Decision.SMALL)
            if policy is Policy.OFF:
                recorder.count_batch(Decision.POLICY_OFF)
        if policy is Policy.OFF:
            return
        self._popularity += self.traffic.drift * self._random.normal(size=self._popularity.shape)
        layers = [self._layer(layer, policy) for layer in range(self.num_layers)]
        for recorder, records in zip(self.recorders, zip(*layers, strict=True), strict=True):
            columns = zip(*records, strict=True)
            recorder.record_batch(LayerRecord(*map(np.array, columns)), self.num_layers)

    def close(self) -> None:
        """Stop as an engine does; the files stay."""
        for recorder in self.recorders:
            recorder.close()
        self.control.close()

    def _layer(self, layer: int, policy: Policy) -> list[LayerRecord]:
        """What every rank tells of it."""
        loads = self._loads(layer)
        before = loads.sum(axis=0).reshape(self.shape.num_ranks, -1).sum(axis=1)
        decision, plan = self._decide(loads, before, policy)
        after = before if plan is None else plan.quota.sum(axis=0)
        slots = np.full((self.shape.num_ranks, self.shape.num_replica_slots), -1, np.int32)
        slot_load = np.zeros_like(slots)
        if plan is not None:
            slots, slot_load = plan.slot_expert, plan.slot_load
        speeds = np.full_like(before, FULL_SPEED) if self._speeds is None else self._speeds
        owner = slots[slots >= 0] // self.shape.num_masters
        sent = np.bincount(owner, minlength=self.shape.num_ranks) * _EXPERT_BYTES
        received = (slots >= 0).sum(axis=1) * _EXPERT_BYTES
        return [
            LayerRecord(
                batch=self._batch,
                bytes_sent=sent[rank],
                bytes_received=received[rank],
                experts_ns=0,
                layer=layer,
                tokens=self.traffic.tokens,
                replicas=(slots >= 0).sum(),
                decision=decision,
                policy=policy.code,
                stage_ns=self._stage_ns(int(sent[rank]), int(received[rank]), int(after.max())),
                load_before=before,
                load_after=after,
                speed=speeds,
                slot_expert=slots,
                slot_load=slot_load,
                is_copied=slots >= 0,
                expert_load=loads.sum(axis=0),
                own_load=loads[rank],
            )
            for rank in range(self.shape.num_ranks)
        ]

    @property
    def _speeds(self) -> NDArray[np.int64] | None:
        speeds = self.traffic.speeds
        return None if speeds is None else np.array(speeds)

    def _loads(self, layer: int) -> NDArray[np.int64]:
        """Assignments (R, E) of one layer."""
        skew = self.traffic.skew
        if self._random.random() < self.traffic.balanced_share:
            skew = 0.0
        weights = np.exp(skew * self._popularity[layer])
        total = self.traffic.tokens * self.traffic.experts_per_token
        expected = total * weights / weights.sum() / self.shape.num_ranks
        noise = 1 + 0.02 * self._random.normal(size=(self.shape.num_ranks, weights.size))
        loads: NDArray[np.int64] = np.maximum(0, expected * noise).astype(np.int64)
        return loads

    def _decide(
        self, loads: NDArray[np.int64], before: NDArray[np.int64], policy: Policy
    ) -> tuple[Decision, Plan | None]:
        if policy is Policy.IDEAL:
            return Decision.FORCED, None
        if before.max() * before.size <= 1.02 * before.sum():
            return Decision.BALANCED, None
        return Decision.PLANNED, plan_quota(
            loads, PlanContext.of(self.shape, speeds=self._speeds), 0
        )

    def _stage_ns(self, sent: int, received: int, busiest: int) -> list[int]:
        times = [0] * len(Stage)
        times[Stage.COUNT] = 15_000
        times[Stage.EXCHANGE] = 30_000
        times[Stage.PLAN] = 40_000
        times[Stage.REPLICATE] = int(sent * _NS_PER_BYTE)
        times[Stage.REROUTE] = 25_000
        times[Stage.WAIT] = int(received * _NS_PER_BYTE)
        times[Stage.COMPUTE] = busiest * _NS_PER_ASSIGNMENT
        return [int(ns * self._random.uniform(0.9, 1.2)) for ns in times]


def planned_run(run_path: Path) -> SyntheticRun:
    """Four ranks whose plans are the planner's; every layer is planned."""
    traffic = SyntheticTraffic(balanced_share=0.0, decode_batches=2)
    return SyntheticRun(run_path, ExpertShape(4, 32, 2), PLANNED_LAYERS, traffic)


def main() -> None:
    """Make the run directory, and ten batches a second until a signal comes."""
    run_path = Path(sys.argv[1])
    run_path.mkdir(mode=0o700)
    run = SyntheticRun(run_path, ExpertShape(4, 32, 2), num_layers=4)
    while True:
        run.batch()
        time.sleep(0.1)


if __name__ == "__main__":
    main()
