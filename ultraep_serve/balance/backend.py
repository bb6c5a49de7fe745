"""What balancing is made of, whether experts live in host memory or on a GPU.

``GroupSetup`` is what the ranks have agreed on. A ``Backend`` (``host.backend``, ``cuda.backend``)
turns it into a ``LayerBalancer`` that an adapter calls for every layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import HEADER_WIDTH

from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.balance.speeds import ExpertClock
from ultraep_serve.costs.model import CostModel, Transfer, saved_picoseconds
from ultraep_serve.errors import UltraEPError
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import ExpertShape, Policy, SpeedSource, TokenView, parse_speeds

if TYPE_CHECKING:  # needs pydantic, which a bare GPU machine may lack
    from ultraep_serve.config import BalanceConfig

__all__ = [
    "Backend",
    "GroupSetup",
    "LayerBalancer",
    "LayerSlots",
    "PolicySource",
    "marking_failure",
    "row_width",
]

Call = TypeVar("Call", bound=Callable[..., Any])

CHUNK_BYTES = 1 << 20  # unit of weight transfer; GPUs take smaller ones
CONNECT_FACTOR = 20  # times timeout_seconds: loading a model takes longer than a batch


@dataclass(frozen=True)
class GroupSetup:
    """One expert-parallel group as this rank sees it."""

    config: "BalanceConfig"
    shape: ExpertShape
    view: TokenView
    location: Location
    engine_group: EngineGroup | None = None  # must be given where there are several domains
    relay: str = "auto"  # whether ranks forward widely replicated experts; "always", "never"
    chunk_bytes: int = CHUNK_BYTES

    @property
    def context(self) -> PlanContext:
        """What plans depend on while all ranks are equally fast."""
        return PlanContext.of(self.shape, self.location.domain_size)

    @property
    def source_rank(self) -> int:
        """Whose tokens this rank routes; tokens that all ranks see count as rank 0's."""
        return self.location.rank if self.view is TokenView.OWN else 0

    @property
    def connect_seconds(self) -> float:
        """How long a rank waits for the others to load."""
        return self.config.timeout_seconds * CONNECT_FACTOR

    def why_never_balanced(self, costs: CostModel, largest_batch: int | None) -> str:
        """What keeps every layer at home, whatever its load, and what to do; empty: nothing does.

        ``largest_batch`` in assignments over all ranks; None: the engine sets no bound.
        """
        config, shape, domain_size = self.config, self.shape, self.location.domain_size
        if domain_size == 1:
            return (
                "every domain has one rank, so there is nowhere to copy experts to; start more "
                "ranks by one ultraep-serve, or choose a larger --domain-size"
            )
        if not shape.num_replica_slots:
            return "without replica slots there is no room for copies; choose --slots 1 or more"
        speeds = parse_speeds(config.speeds) or (1.0,) * shape.num_ranks
        worst = sum(speeds) / min(speeds)  # all assignments on the slowest rank
        if config.speeds != SpeedSource.AUTO.value and config.max_imbalance >= worst:
            return (
                f"no load is more uneven than {worst:.3g}, and up to --max-imbalance "
                f"{config.max_imbalance:g} all are left alone; choose less"
            )
        if largest_batch is None:
            return ""
        loads, one_expert = (largest_batch, -(-largest_batch // domain_size)), Transfer(1, 1)
        if saved_picoseconds(*loads, shape, one_expert, costs.integer_costs()) > 0:
            return ""
        return (
            "by the costs that were measured or given, copying one expert takes longer than it "
            f"could save in the largest batch, of {largest_batch} assignments; let the engine "
            "schedule more tokens at once"
        )


def row_width(num_logical_experts: int, view: TokenView) -> int:
    """Integers that a rank contributes to an exchange; loads travel only where they differ."""
    return HEADER_WIDTH + (num_logical_experts if view is TokenView.OWN else 0)


@dataclass(frozen=True)
class LayerSlots:
    """Where one layer's expert tensors live; N tensors make up an expert."""

    tensors: list[torch.Tensor]  # N tensors (L + S, ...), masters first
    master_addresses: NDArray[np.int64]  # (N,) first master
    region_offsets: NDArray[np.int64]  # (N,) of slot 0 within every rank's pool
    expert_bytes: NDArray[np.int64]  # (N,)
    chunks: NDArray[np.int64]  # (C, 3) units of transfer: tensor index, offset, size

    @cached_property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert in all tensors."""
        return int(self.expert_bytes.sum())

    @classmethod
    def of(
        cls, tensors: list[torch.Tensor], offsets: list[int], sizes: list[int], chunk_bytes: int
    ) -> "LayerSlots":
        """Describe adopted ``tensors``, with their ``region_offsets`` and ``expert_bytes``."""
        chunks = [
            (index, offset, min(chunk_bytes, size - offset))
            for index, size in enumerate(sizes)
            for offset in range(0, size, chunk_bytes)
        ]
        return cls(
            tensors=tensors,
            master_addresses=np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64),
            region_offsets=np.array(offsets, dtype=np.int64),
            expert_bytes=np.array(sizes, dtype=np.int64),
            chunks=np.array(chunks, dtype=np.int64).reshape(-1, 3),
        )


class PolicySource(Protocol):
    """Where rank 0 reads what is in force."""

    @property
    def policy(self) -> Policy: ...

    @property
    def speeds(self) -> SpeedSource:
        """Where the speeds of ranks come from."""
        ...

    def switch_off_in_doubt(self) -> object:
        """Have ``off`` in force until somebody sets a policy. Raises ControlError."""


def marking_failure(call: Call) -> Call:
    """Have an error that ``call`` of a balancer raises mark this rank as failed for the sidecar."""

    @wraps(call)
    def marked(balancer: Any, *args: Any, **named: Any) -> Any:
        try:
            return call(balancer, *args, **named)
        except UltraEPError as error:
            balancer._recorder.fail(str(error))
            raise

    return cast(Call, marked)


class LayerBalancer(Protocol):
    """What balances every layer, by three calls in the order in which they stand here.

    All ranks must call ``route`` in the same order. Micro-batches may overlap, each with its three
    calls.
    """

    def route(
        self, layer: int, topk_ids: torch.Tensor, batch_tokens: int, micro_batch: int = 0
    ) -> torch.Tensor:
        """Physical ids (T, K) for logical ``topk_ids`` (T, K), padding -1 kept.

        They are int32, or of the type of ``topk_ids``.
        ``layer`` counts MoE layers from 0 in the order they run, ``batch_tokens`` is the batch's
        token count over all ranks. Raises PeerTimeoutError when a rank is gone.
        """

    def receive(self, micro_batch: int = 0) -> ExpertClock:
        """Order what is computed, or launched, next behind the arrival of all copies of the layer.

        An engine calls it between its dispatch and its experts. Returns the clock of these.
        """

    def computed(self, micro_batch: int = 0) -> None:
        """Take note that the engine has computed, or launched, the layer, and combined it.

        Raises PeerTimeoutError when a rank is known to be gone. Nobody answers with what came of
        it: where that is known later, the device has stopped.
        """

    @property
    def is_waiting(self) -> bool:
        """Whether others may be waited for where no process is looked at; any thread may ask."""

    def end_loading(self) -> None:
        """Expect others to answer within the timeout; before this they may be compiling."""


class Backend(Protocol):
    """Makes a balancer. Its methods are called in the order in which they stand here."""

    @property
    def slot_bytes(self) -> int:
        """What this rank's replica slots cost, once all layers are adopted."""

    def adopt(self, masters: list[torch.Tensor]) -> LayerSlots:
        """Move one layer's expert tensors (L, ...) in front of the slots; returns the aliases.

        The old tensors may be empty afterwards. Raises UnsupportedError, ConfigError, DeviceError.
        """

    def connect(self) -> None:
        """Return when all ranks of the domain reach each other's slots.

        Raises FabricError, UnsupportedError where this rank does not reach another's.
        """

    @property
    def neighbours(self) -> Mapping[int, int]:
        """Processes, by rank, that are to be watched because kernels wait for them; once connected.

        A process is 0 where it cannot be seen.
        """

    def close(self) -> None:
        """Give everything back; tensors that ``adopt`` returned must not be used any more."""

    def calibrate(self, run_layer: Callable[[int], None]) -> CostModel:
        """Measure costs, all ranks together; see ``costs.calibration.agreed_costs``."""

    def make_balancer(
        self,
        policies: PolicySource | None,
        recorder: Recorder,
        costs: CostModel,
        samples: Any = None,
    ) -> LayerBalancer:
        """Return the balancer, warm; all ranks call this. ``policies`` is rank 0's.

        ``samples`` check layers while they serve, as the balancer calls them; None: no layers.
        """
