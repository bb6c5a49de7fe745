"""Expert parallelism on CPU, which vLLM's own CPU kernel does not survive.

vLLM's kernel ignores the expert map and reads out of bounds for experts of other ranks. It computes
local experts correctly from one row per assignment, so that is what it gets here: rows are gathered
(tensor parallel: every rank has all tokens) or sent to the rank that computes them (data parallel),
and added back per token, weighted. Where vLLM itself can gather tokens of data-parallel ranks on
CPU (vllm-project/vllm#47778, in no release yet), ranks have all tokens then too.

Beside vLLM's kernel there are other ways of computing experts, of which the fastest is chosen when
a model is loaded (``engines.common.ways``). The tokens of all ranks decide which of them a batch
takes, so that it does not depend on the rank that computes a token.

Sums are taken in float32 until they are complete, across ranks too. Ranks of a host write rows
where all of them read (``balance.host.sums``), and a token's are added in the order of its experts,
whoever computed them. Elsewhere, and for few tokens, each rank adds up its own rows and the engine
the ranks: weighted outputs in bfloat16 have 8 significant bits, so that is exact too unless they
differ in size by more than 2**13. So no token's result depends on which rank computed which expert.
Only with ``numerics: engine`` each rank may round its part of a token's sum, as vLLM does without
expert parallelism.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed import get_dp_group, get_ep_group, get_tp_group
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import (
    PassThroughPrepareAndFinalize,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ultraep_serve.balance.physical import identity_table
from ultraep_serve.balance.speeds import expert_clock
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.cpu_experts import (
    Expert,
    Rows,
    float32_product,
    write_by_expert,
)
from ultraep_serve.engines.common.execution import Execution
from ultraep_serve.engines.common.ways import ChosenWays, Sample, Way, choose_for_kinds
from ultraep_serve.engines.vllm.checks import check_cpu_execution, has_amx
from ultraep_serve.engines.vllm.expert_tensors import fit_shared_values
from ultraep_serve.types import CheckResult

if TYPE_CHECKING:
    from ultraep_serve.balance.host.sums import HostSums

__all__ = [
    "Assignments",
    "CpuExperts",
    "compute_and_reduce",
    "dispatch_compute_combine",
    "gather_compute_scatter",
    "has_ragged_collectives",
    "take_over_combine",
    "ways_of",
]

_LOGGER = logging.getLogger("vllm.ultraep_serve")
_MOST_SCRATCH = 1 << 30  # bytes for the rows of a call of vLLM's kernel, which it keeps
_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {  # of the gate
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: functools.partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class Assignments:
    """Where each (token, k) pair is computed."""

    rank: torch.Tensor  # (T, K) int64 target rank, -1 padding
    local: torch.Tensor  # (T, K) int32 expert on that rank

    @classmethod
    def from_physical(cls, physical: torch.Tensor, num_local: int) -> "Assignments":
        """Split physical ids (T, K) = rank * num_local + local, -1 padding."""
        rank = torch.div(physical, num_local, rounding_mode="floor").long()
        return cls(rank=rank, local=(physical - rank * num_local).int())


class CpuExperts(Execution[RoutedExperts]):
    """``Execution`` on CPU, where the adapter dispatches, computes experts and combines."""

    num_micro_batches = 1

    def __init__(self, config: BalanceConfig) -> None:
        """Ask the operating system for AMX, where the CPU has it.

        A process that has not asked is ended when a kernel uses AMX. vLLM's kernels for experts
        leave that to layers that run before them, but costs are measured before those run.
        """
        if has_amx():
            torch.cpu._init_amx()
        self._config = config
        self._ways: dict[RoutedExperts, ChosenWays] = {}
        self._sums: HostSums | None = None
        self._num_local = 0  # physical experts per rank
        self._identity: torch.Tensor | None = None  # physical ids (E,) where there are no slots

    def check(self, layer: RoutedExperts) -> None:
        check_cpu_execution(layer)

    def choose_ways(self, layers: Sequence[RoutedExperts]) -> CheckResult:
        ways = [ways_of(layer) for layer in layers]
        group = get_ep_group().cpu_group
        chosen, found = choose_for_kinds(ways, map(_sample, layers), group, self._config)
        self._ways = dict(zip(layers, chosen, strict=True))
        moe = layers[0].moe_config
        if moe.dp_size == 1:
            # Only now: vLLM loads this module where it cannot bear numba (``_group_of_model``).
            from ultraep_serve.balance.host.sums import HostSums

            top_k, hidden_size = max(layer.top_k for layer in layers), layers[0].hidden_size
            shape = torch.Size((moe.max_num_tokens, top_k, hidden_size))
            self._sums = HostSums.connect(group, shape, moe.in_dtype, self._config.timeout_seconds)
        return found

    def resize(
        self,
        layers: Sequence[RoutedExperts],
        parameters: Sequence[Sequence[torch.nn.Parameter]],
        before: int,
        after: int,
    ) -> None:
        for layer, own in zip(layers, parameters, strict=True):
            fit_shared_values(layer, own, before, after)
        self._num_local = after

    def finish(self, layers: Sequence[RoutedExperts]) -> None:
        """Put our dispatch and combine in place, with slots or without.

        Raises UnsupportedError for a layer that they cannot run.
        """
        parallel = layers[0].moe_config.moe_parallel_config
        if parallel.use_ep:
            for layer in layers:
                check_cpu_execution(layer)
                take_over_combine(layer)
            if not self._ways:  # nothing is balanced
                found = self.choose_ways(layers)
                if parallel.ep_rank == 0:
                    _LOGGER.info("ultraep: experts: %s", found.detail)
        num_experts, num_ranks = layers[0].global_num_experts, parallel.ep_size
        self._num_local = self._num_local or -(-num_experts // num_ranks)
        self._identity = torch.from_numpy(identity_table(num_experts, num_ranks, 0))

    def end_loading(self) -> None:
        if self._sums is not None:
            self._sums.end_loading()

    def plain_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Physical ids (T, K) of masters where there are no slots; padding -1 kept."""
        assert self._identity is not None, "layers are finished first"
        return self._identity[topk_ids.long()]

    def compute(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        physical: torch.Tensor,
    ) -> torch.Tensor:
        """Complete output (T, H) for this rank's tokens ``x`` (T, H)."""
        group, way = get_ep_group(), functools.partial(self._way, layer)
        if layer.moe_config.dp_size > 1:
            assignments = Assignments.from_physical(physical, self._num_local)
            if has_ragged_collectives(data := get_dp_group()):
                return gather_compute_scatter(way, x, topk_weights, assignments, data)
            return dispatch_compute_combine(way, x, topk_weights, assignments, group.cpu_group)
        # Only now, as above.
        from ultraep_kernels.host.combine import own_experts

        own = own_experts(physical, group.rank_in_group * self._num_local, self._num_local)
        return compute_and_reduce(way(x.shape[0]), x, topk_weights, own, group, self._sums)

    def _way(self, layer: RoutedExperts, num_tokens: int) -> Way:
        """The way of computing ``layer`` for a batch of ``num_tokens`` of all ranks."""
        return self._ways[layer].of(num_tokens * layer.top_k // layer.moe_config.num_experts)


def take_over_combine(layer: RoutedExperts) -> None:
    """Tell vLLM that ``layer``'s output comes complete, so that it does not reduce it again.

    Uses the stage vLLM has for experts that dispatch and combine themselves.
    """
    experts = layer.quant_method.moe_kernel.fused_experts
    layer.quant_method.moe_kernel = mk.FusedMoEKernel(PassThroughPrepareAndFinalize(), experts)


def compute_and_reduce(
    way: Way,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    own: torch.Tensor,
    group: GroupCoordinator,
    sums: "HostSums | None",
) -> torch.Tensor:
    """Complete output (T, H) where every rank of ``group`` has all tokens ``x`` (T, H).

    ``topk_weights`` (T, K); ``own`` (T, K) int32, experts of this rank, -1 for another rank's.
    Without ``sums``, or for tokens that they do not take, vLLM adds up.
    """
    if sums is not None and sums.takes(own.shape):
        with expert_clock:
            way.compute(x, topk_weights, own, Rows(*sums.rows(own.shape)))
        return sums.total(own.shape)
    with expert_clock:
        own_total = way.total(x, topk_weights, own)
    total: torch.Tensor = _group_to_reduce(group).all_reduce(own_total)
    return total.to(x.dtype)


def _group_to_reduce(ranks: GroupCoordinator) -> GroupCoordinator:
    """Return the tensor-parallel group if it has the same ranks: it reduces in shared memory."""
    same: GroupCoordinator = get_tp_group()
    return same if same.ranks == ranks.ranks else ranks


def has_ragged_collectives(group: GroupCoordinator) -> bool:
    """Whether vLLM gathers and scatters rows (n, ...) of ``group``'s ranks, n as each has them."""
    own, base = type(group.device_communicator), DeviceCommunicatorBase
    return issubclass(own, base) and (
        own.all_gatherv is not base.all_gatherv and own.reduce_scatterv is not base.reduce_scatterv
    )


def gather_compute_scatter(
    way: Callable[[int], Way],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    assignments: Assignments,
    group: GroupCoordinator,
) -> torch.Tensor:
    """Complete output (T, H) for this rank's own tokens ``x`` (T, H), by vLLM's own collectives.

    Arguments as ``dispatch_compute_combine``; ranks of ``group`` may have different T.
    """
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(group.world_size)]
    dist.all_gather(counts, torch.tensor([x.shape[0]]), group=group.cpu_group)
    sizes = [int(count) for count in counts]
    # vLLM's shared memory carries floating point only; float32 holds ranks and slots exactly
    told = [part.float() for part in (topk_weights, assignments.rank, assignments.local)]
    rows, heard = group.all_gatherv([x, torch.cat(told, dim=1)], 0, sizes)
    weights, rank, local = heard.chunk(3, dim=1)
    own = torch.where(rank == group.rank_in_group, local, -1).to(assignments.local.dtype)
    with expert_clock:
        own_total = way(sum(sizes)).total(rows, weights.contiguous(), own)
    total: torch.Tensor = group.reduce_scatterv(own_total, 0, sizes)
    return total.to(x.dtype)


def dispatch_compute_combine(
    way: Callable[[int], Way],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    assignments: Assignments,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Complete output (T, H) for this rank's own tokens ``x`` (T, H), through all-to-all.

    ``way`` is asked for that of so many tokens of all ranks. Every assignment comes home as a row
    of its own.
    """
    num_ranks = dist.get_world_size(group)
    target = assignments.rank.view(-1)
    order = torch.argsort(target, stable=True)
    order = order[int((target < 0).sum()) :]
    tokens = torch.div(order, topk_weights.shape[1], rounding_mode="floor")
    send = torch.bincount(target[order], minlength=num_ranks)
    told = torch.stack([send, torch.full_like(send, x.shape[0])], dim=1)  # to each rank
    heard = torch.empty_like(told)
    dist.all_to_all_single(heard, told, group=group)
    away, here = send.tolist(), heard[:, 0].tolist()
    rows = _all_to_all(x[tokens], away, here, group)
    local = _all_to_all(assignments.local.view(-1)[order], away, here, group)
    weights = _all_to_all(topk_weights.reshape(-1)[order], away, here, group)
    num_tokens = int(heard[:, 1].sum())
    with expert_clock:
        computed = way(num_tokens).rows(rows, weights[:, None], local[:, None])
    as_sent = computed.rows.index_select(0, computed.place.view(-1))
    place = torch.full(topk_weights.shape, -1, dtype=torch.int32)
    place.view(-1)[order] = torch.arange(order.numel(), dtype=torch.int32)
    home = Rows(place, _all_to_all(as_sent, here, away, group))
    return home.add_to(torch.empty_like(x))


def ways_of(layer: RoutedExperts) -> list[Way]:
    """The ways in which ``layer``'s experts can be computed, vLLM's own first."""
    ways = [Way("kernel", functools.partial(_by_kernel, layer))]
    if _has_products(layer):
        dtypes = {"products": layer.w13_weight.dtype, "float32": torch.float32}
        ways += [
            Way(name, functools.partial(_by_products, layer, dtype))
            for name, dtype in dtypes.items()
            if name == "products" or dtype is not dtypes["products"]
        ]
    if _has_tiles(layer):
        ways.append(Way("tiles", functools.partial(_by_tiles, layer)))
    is_alone = layer.top_k == 1 or layer.moe_config.dp_size > 1  # an assignment, in its row
    if not is_alone and not layer.apply_router_weight_on_input:
        ways.append(Way("sums", functools.partial(_by_summing_kernel, layer), sums=True))
    return ways


def _sample(layer: RoutedExperts) -> Sample:
    return Sample(
        num_local_experts=layer.w13_weight.shape[0],
        num_ranks=layer.moe_config.ep_size,
        experts_per_token=layer.top_k,
        hidden_size=layer.hidden_size,
        dtype=layer.moe_config.in_dtype,
    )


def _by_kernel(
    layer: RoutedExperts,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local: torch.Tensor,
    outputs: Rows,
) -> None:
    """In the order of tokens: sums are quicker then, and the kernel sorts by expert anyway."""
    # Only now: vLLM loads this module where it cannot bear numba (``_group_of_model``).
    from ultraep_kernels.host.combine import own_rows

    tokens, experts, weights = own_rows(local, topk_weights.float(), outputs.place)
    for part in _calls(layer, len(tokens), 1):
        rows = x.index_select(0, tokens[part])
        own = weights[part].unsqueeze(1), experts[part].unsqueeze(1)
        _run_kernel(layer, rows, *own, outputs.rows[part])


def _by_tiles(
    layer: RoutedExperts,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local: torch.Tensor,
    outputs: Rows,
) -> None:
    # Only now, as above.
    from ultraep_kernels.host.tiles import compute_experts

    matrices = layer.w13_weight, layer.w2_weight
    weights = topk_weights.float().contiguous()
    compute_experts(x.contiguous(), weights, local.contiguous(), matrices, *outputs)


def _by_products(
    layer: RoutedExperts,
    dtype: torch.dtype,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local: torch.Tensor,
    outputs: Rows,
) -> None:
    expert = functools.partial(_expert, layer, dtype)
    write_by_expert(expert, layer.w13_weight.shape[0], x, topk_weights, local, outputs)


def _by_summing_kernel(
    layer: RoutedExperts,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local: torch.Tensor,
    outputs: Rows,
) -> None:
    """Tokens with the same number of experts here together: the kernel has it that all have."""
    numbers = (local >= 0).sum(dim=1)
    order = torch.argsort(local, dim=1, descending=True)  # other ranks' last
    weights, experts = topk_weights.gather(1, order), local.gather(1, order)
    outputs.place.fill_(-1)
    end = 0
    for number in range(1, local.shape[1] + 1):
        tokens = (numbers == number).nonzero().squeeze(1)
        for part in _calls(layer, len(tokens), number):
            some = tokens[part]
            begin, end = end, end + len(some)
            outputs.place[some, 0] = torch.arange(begin, end, dtype=torch.int32)
            own = weights[some, :number], experts[some, :number]
            _run_kernel(layer, x.index_select(0, some), *own, outputs.rows[begin:end])


def _calls(layer: RoutedExperts, num_tokens: int, top_k: int) -> Iterator[slice]:
    """Parts of tokens, so many that vLLM's kernel has room for ``top_k`` rows of each."""
    w13, hidden_size = layer.w13_weight, layer.hidden_size
    most = max(1, _MOST_SCRATCH // (4 * (hidden_size + w13.shape[1]) * top_k))
    for first in range(0, num_tokens, most):
        yield slice(first, min(first + most, num_tokens))


def _has_products(layer: RoutedExperts) -> bool:
    """Whether ``layer``'s matrices can be read, and what vLLM's kernel does with them is known."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    return (
        isinstance(kernel, CPUUnquantizedExperts)
        and kernel.isa == "vec"
        and layer.activation in _ACTIVATIONS
        and not layer.apply_router_weight_on_input
        and is_packed_as_known(layer.w13_weight.dtype)
    )


def _has_tiles(layer: RoutedExperts) -> bool:
    """Whether our kernel for AMX computes what vLLM's does with ``layer``'s matrices."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    if not (isinstance(kernel, CPUUnquantizedExperts) and kernel.isa == "amx"):
        return False
    # Only now, as above.
    from ultraep_kernels.host.tiles import can_compute

    return (
        layer.activation is MoEActivation.SILU
        and not layer.apply_router_weight_on_input
        and kernel.w1_bias is kernel.w2_bias is None
        and can_compute(layer.w13_weight, layer.w2_weight)
        and is_packed_for_tiles()
    )


def _expert(layer: RoutedExperts, dtype: torch.dtype, index: int) -> Expert:
    """Local expert ``index`` of ``layer``, computed in ``dtype``."""
    # Only now, as above.
    from ultraep_kernels.host.unpack import unpack

    experts = layer.quant_method.moe_kernel.fused_experts
    w13, w2 = (unpack(packed[index]).to(dtype) for packed in (layer.w13_weight, layer.w2_weight))
    biases = [
        None if bias is None else bias[index].to(dtype)
        for bias in (experts.w1_bias, experts.w2_bias)
    ]

    def compute(rows: torch.Tensor) -> torch.Tensor:
        gate, up = _product(rows.to(dtype), w13, biases[0]).chunk(2, dim=1)
        # In float32 and rounded once, as vLLM's own activations, which take 2 to 10 times as long.
        inner = _ACTIVATIONS[layer.activation](gate.float()).mul_(up).to(dtype)
        return _product(inner, w2, biases[1])

    return compute


def _product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if rows.dtype is torch.float32:
        product = float32_product(rows, matrix.T)
        return product if bias is None else product.add_(bias)
    return rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)


@functools.cache
def is_packed_as_known(dtype: torch.dtype) -> bool:
    """Whether this vLLM packs matrices of ``dtype`` for "vec" as ``unpack`` expects it."""
    # Only now, as above.
    from ultraep_kernels.host.unpack import COLUMNS, unpack

    plain = torch.arange(8 * COLUMNS).view(1, 2 * COLUMNS, 4).to(dtype)
    return torch.equal(unpack(cpu_prepack_moe_weight(plain, "vec")[0]), plain[0].T)


@functools.cache
def is_packed_for_tiles() -> bool:
    """Whether this vLLM packs matrices for "amx" as ``compute_experts`` expects them."""
    # Only now, as above.
    from ultraep_kernels.host.tiles import INPUTS, packed

    bits = torch.arange(8 * INPUTS * INPUTS, dtype=torch.int16)  # each another number, finite
    plain = bits.view(torch.bfloat16).view(1, 2 * INPUTS, 4 * INPUTS)
    return torch.equal(cpu_prepack_moe_weight(plain, "amx"), packed(plain))


def _run_kernel(
    layer: RoutedExperts,
    rows: torch.Tensor,
    weights: torch.Tensor,
    local: torch.Tensor,
    outputs: torch.Tensor,
) -> None:
    """Write weighted sums (N, H) for ``rows`` (N, H) of ``local`` experts (N, k), by the kernel."""
    weights = weights.float().contiguous()
    on_input = layer.apply_router_weight_on_input
    if on_input:
        rows = rows * weights.to(rows.dtype)
    empty = rows.new_empty(0)
    layer.quant_method.moe_kernel.fused_experts.apply(
        output=outputs,
        hidden_states=rows,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=weights,
        topk_ids=local.contiguous(),
        activation=layer.activation,
        global_num_experts=layer.w13_weight.shape[0],
        expert_map=None,
        a1q_scale=None,
        a2_scale=None,
        workspace13=empty,
        workspace2=empty,
        expert_tokens_meta=None,
        apply_router_weight_on_input=on_input,
    )


def _all_to_all(
    rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange rows (N, ...) between ranks, in rank order; bytes, whatever the dtype."""
    width = math.prod(rows.shape[1:]) * rows.element_size()
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(
        out.view(-1).view(torch.uint8),
        rows.contiguous().view(-1).view(torch.uint8),
        [count * width for count in receive],
        [count * width for count in send],
        group=group,
    )
    return out
