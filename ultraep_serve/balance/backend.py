"""What balancing is made of, whether experts live in host memory or on a GPU.

``GroupSetup`` is what the ranks have agreed on. A ``Backend`` (``host.backend``, ``cuda.backend``)
turns it into a ``LayerBalancer`` that an adapter calls for every layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import HEADER_WIDTH
from ultraep_kernels.host.speeds import full_speeds, whole_speeds

from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.balance.slots import LayerSlots, SlotPool
from ultraep_serve.costs.calibration import Probes, agreed_costs
from ultraep_serve.costs.model import CostModel, Transfer, saved_picoseconds
from ultraep_serve.errors import ConfigError, UltraEPError
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import ExpertShape, TokenView, parse_speeds

if TYPE_CHECKING:
    from ultraep_serve.config import BalanceConfig  # needs pydantic, which GPU machines may lack

Call = TypeVar("Call", bound=Callable[..., Any])

CHUNK_BYTES = 1 << 20  # unit of weight transfer; GPUs take smaller ones
CONNECT_FACTOR = 20  # times timeout_seconds: loading a model takes longer than a batch


@dataclass(frozen=True)
class GroupSetup:
    """One expert-parallel group as this rank sees it.

    Raises ConfigError where speeds are set but not one per rank.
    """

    config: "BalanceConfig"
    shape: ExpertShape
    view: TokenView
    location: Location
    engine_group: EngineGroup | None = None  # must be given where there are several domains
    relay: str = "auto"  # whether ranks forward widely replicated experts; "always", "never"
    chunk_bytes: int = CHUNK_BYTES
    run_path: Path = Path()  # where the ranks of this host and pipeline stage meet

    # of all ranks (R,), as they are set; None where ranks measure them
    speeds: NDArray[np.int64] | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "speeds", fixed_speeds(self.config.speeds, self.shape.num_ranks))

    @property
    def context(self) -> PlanContext:
        """What plans depend on; ranks that measure count as equally fast until they know."""
        return PlanContext.of(self.shape, self.location.domain_size, self.speeds)

    @property
    def source_rank(self) -> int:
        """Whose tokens this rank routes; tokens that all ranks see count as rank 0's."""
        return self.location.rank if self.view is TokenView.OWN else 0

    def why_never_balanced(self, costs: CostModel, largest_batch: int | None) -> str:
        """What keeps every layer at home, whatever its load, and what to do; empty: nothing does.

        ``largest_batch`` in assignments over all ranks; None: the engine sets no bound.
        """
        most, domain_size = self.config.max_imbalance, self.location.domain_size
        if domain_size == 1:
            return (
                "every domain has one rank, so there is nowhere to copy experts to; start more "
                "ranks by one ultraep-serve, or choose a larger --domain-size"
            )
        if not self.shape.num_replica_slots:
            return "without replica slots there is no room for copies; choose --slots 1 or more"
        if self.speeds is not None:
            worst = self.speeds.sum() / self.speeds.min()  # all assignments on the slowest rank
            if most >= worst:
                return (
                    f"no load is more uneven than {worst:.3g}, and up to --max-imbalance {most:g} "
                    "all are left alone; choose less"
                )
        if largest_batch is None:
            return ""
        loads, one_expert = (largest_batch, -(-largest_batch // domain_size)), Transfer(1, 1)
        if saved_picoseconds(*loads, self.shape, one_expert, costs.integer_costs()) > 0:
            return ""
        return (
            "by the costs that were measured or given, copying one expert takes longer than it "
            f"could save in the largest batch, of {largest_batch} assignments; let the engine "
            "schedule more tokens at once"
        )

    @property
    def connect_seconds(self) -> float:
        """How long a rank waits for the others to load."""
        return self.config.timeout_seconds * CONNECT_FACTOR


def fixed_speeds(text: str, num_ranks: int) -> NDArray[np.int64] | None:
    """Speeds (R,) that the setting ``text`` fixes, the largest FULL_SPEED; None for "auto".

    Raises ConfigError unless there is one per rank.
    """
    if text == "auto":
        return None
    values = parse_speeds(text)
    if values and len(values) != num_ranks:
        raise ConfigError(f"speeds = {text!r} has {len(values)} numbers for {num_ranks} ranks")
    return whole_speeds(values) if values else full_speeds(num_ranks)


def row_width(num_logical_experts: int, view: TokenView) -> int:
    """Integers that a rank contributes to an exchange; loads travel only where they differ."""
    return HEADER_WIDTH + (num_logical_experts if view is TokenView.OWN else 0)


def is_capturing(ids: torch.Tensor) -> bool:
    """Whether what is launched now for ``ids`` goes into a CUDA graph instead of being run."""
    return ids.is_cuda and torch.cuda.is_current_stream_capturing()


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
    """What balances every layer, by four calls in the order in which they stand here.

    All ranks must call ``route`` in the same order. Micro-batches may overlap, each with its four
    calls, on GPUs alone.
    """

    _fabric: Any

    def route(
        self, layer: int, topk_ids: torch.Tensor, batch_tokens: int, micro_batch: int = 0
    ) -> torch.Tensor:
        """Physical ids (T, K) for logical ``topk_ids`` (T, K), padding -1 kept.

        They are int32, or of the type of ``topk_ids``.
        ``layer`` counts MoE layers from 0 in the order they run, ``batch_tokens`` is the batch's
        token count over all ranks. Raises PeerTimeoutError when a rank is gone.
        """

    def receive(self, micro_batch: int = 0) -> None:
        """Order what is computed, or launched, next behind the arrival of all copies of the layer.

        An engine calls it between its dispatch and its experts.
        """

    def experts_done(self, micro_batch: int = 0) -> None:
        """Take note that the experts are computed, or launched, which are timed until here."""

    def computed(self, micro_batch: int = 0) -> None:
        """Take note that the engine has computed, or launched, the layer, and combined it.

        Raises PeerTimeoutError when a rank is known to be gone. Nobody answers with what came of
        it: where that is known later, the device has stopped.
        """

    def forget(self) -> None:
        """Have all ranks copy anew what layers need: experts of this one may have changed."""

    def end_loading(self) -> None:
        """Expect others to answer within the timeout; before this they may be compiling."""
        self._fabric.wait_at_least(0)
        self.forget()  # what was tried out was no traffic

    @property
    def is_waiting(self) -> bool:
        """Whether others may be waited for where no process is looked at; any thread may ask."""
        return False


class Backend(ABC):
    """Makes a balancer. Its methods are called in the order in which they stand here."""

    balancer_class: type[Any]
    fabric: Any  # once connected

    def __init__(self, setup: GroupSetup, pool: SlotPool) -> None:
        self.setup, self._pool = setup, pool
        self.layers: list[LayerSlots] = []
        self._undo = ExitStack()
        self._undo.callback(pool.close)

    @property
    def slot_bytes(self) -> int:
        """What this rank's replica slots cost, once all layers are adopted."""
        return self._pool.slot_bytes

    def adopt(self, masters: list[torch.Tensor]) -> LayerSlots:
        """Move one layer's expert tensors (L, ...) in front of the slots; returns the aliases.

        The old tensors may be empty afterwards. Raises UnsupportedError, ConfigError, DeviceError.
        """
        self.layers.append(self._pool.adopt(masters))
        return self.layers[-1]

    @abstractmethod
    def connect(self) -> None:
        """Return when all ranks of the domain reach each other's slots.

        Raises FabricError, UnsupportedError where this rank does not reach another's.
        """

    @property
    def neighbours(self) -> Mapping[int, int]:
        """Processes, by rank, that are to be watched because kernels wait for them; once connected.

        A process is 0 where it cannot be seen. Elsewhere whoever waits looks at processes.
        """
        return {}

    def close(self) -> None:
        """Give everything back; tensors that ``adopt`` returned must not be used any more."""
        self._undo.close()

    def calibrate(self, run_layer: Callable[[int], None]) -> CostModel:
        """Measure costs, all ranks together; see ``costs.calibration.agreed_costs``."""
        setup, layer = self.setup, self.layers[0]
        probes = self._probes(layer)
        size = layer.bytes_per_expert
        return agreed_costs(setup.config.costs, setup.shape, size, probes, run_layer)

    @abstractmethod
    def _probes(self, layer: LayerSlots) -> Probes:
        """What costs are measured with, warm."""

    def make_balancer(
        self, policies: ControlPage | None, recorder: Recorder, costs: CostModel, samples: Any
    ) -> LayerBalancer:
        """Return the balancer, warm; all ranks call this. ``policies`` is rank 0's.

        ``samples`` check layers while they serve, as the balancer calls them; None: no layers.
        """
        given = self.setup, self.layers, self.fabric, policies, recorder
        balancer: LayerBalancer = self.balancer_class(*given, costs.integer_costs(), samples)
        self._warm_up(balancer, recorder)
        return balancer

    def _warm_up(self, balancer: Any, recorder: Recorder) -> None:
        """Do what is left before the balancer serves."""
        return
