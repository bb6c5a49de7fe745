"""FlashInfer's one-sided dispatch and combine without NVLink, over a group's collectives.

By the contracts that FlashInfer 0.7.2 documents, in ``flashinfer/comm/trtllm_moe_alltoall.py``
(``MoeAlltoAll``, all that vLLM 0.32 uses) and ``flashinfer/moe_ep`` (``create_communication`` and
``NVLinkOneSidedAlltoAll`` over it, for vLLM 0.33), and its kernels, ``moeAlltoAllDispatch.cu``:
expert ``e`` of ``n`` lives on rank ``e // (n / R)``, rounded towards zero, so that -1 goes to rank
0. Every rank gets (R, tokens) rows, of which those that nobody wrote have ids of no expert, and
rubbish in all else. Also its CUTLASS kernel for experts in BF16, as vLLM calls it, and its
megakernel (``flashinfer/moe_ep``, ``MoEEpMegaLayer``), which here leaves activations as they are
where that one rounds them to NVFP4.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.emulated_gpu.references.deep_ep import RUBBISH, everywhere

__all__ = [
    "MoeAlltoAll",
    "NVLinkOneSidedAlltoAll",
    "cutlass_fused_moe",
    "install_flashinfer",
    "put",
]

QuantFormat = Enum("QuantFormat", ["BF16", "FP16", "DeepSeekFp8", "MXFP8", "NVFP4"])
# as vLLM names them
ActivationType = Enum("ActivationType", ["Silu", "Gelu", "Swiglu", "Geglu", "Relu2"])
_BYTES = {QuantFormat.BF16: 2, QuantFormat.FP16: 2}  # of a dispatched value; others have no values


class MoeAlltoAll:
    """The primitive; ``workspaces`` are shared by all that have one size, as FlashInfer's are."""

    workspaces: set[int] = set()  # noqa: RUF012 one process, one set

    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int,
        mnnvl_config: Any,
    ) -> None:
        self.max_num_tokens, self.top_k, self.num_experts = max_num_tokens, top_k, num_experts
        self.workspace_size, self._group = workspace_size_per_rank, mnnvl_config.comm_backend._group
        self.rank, self.size = mnnvl_config.comm_backend.Get_rank(), mapping.moe_ep_size
        self._sent: torch.Tensor | None = None
        self.workspaces.add(workspace_size_per_rank)

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int,
        expert_id_payload_index: int,
    ) -> list[torch.Tensor]:
        """Payloads (R, tokens, *) of all tokens that have an expert here."""
        assert self._sent is None, "dispatch called twice without combine"
        assert runtime_max_tokens_per_rank <= self.max_num_tokens
        assert token_selected_experts.dtype == torch.int32
        assert token_selected_experts.shape[1] == self.top_k
        rows = self.size * runtime_max_tokens_per_rank
        needed = sum(part.shape[1] * part.element_size() for part in input_payloads) * rows
        assert needed <= self.workspace_size, "workspace size per rank insufficient"
        ids = token_selected_experts.cpu()
        target = torch.div(ids, self.num_experts // self.size, rounding_mode="trunc")
        assert not len(ids) or int(target.max()) < self.size, "an id beyond the experts"
        goes = torch.stack([(target == rank).any(1) for rank in range(self.size)], 1)
        self._sent = goes
        received = [
            torch.full((self.size, runtime_max_tokens_per_rank, part.shape[1]), RUBBISH)
            .to(part.dtype)
            .flatten(0, 1)
            for part in input_payloads
        ]
        received[expert_id_payload_index].fill_(invalid_token_expert_id)
        for source, (parts, going) in enumerate(
            everywhere((tuple(input_payloads), goes), self._group)
        ):
            token = torch.nonzero(going[:, self.rank]).view(-1)
            first = source * runtime_max_tokens_per_rank
            for rows_here, part in zip(received, parts, strict=True):
                rows_here[first : first + len(token)] = part[token]
        device = token_selected_experts.device
        shape = self.size, runtime_max_tokens_per_rank, -1
        return [part.view(shape).to(device) for part in received]

    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        output: torch.Tensor,
        use_low_precision: bool = False,
    ) -> torch.Tensor:
        """Sums over ranks of each token's rows of ``payload`` (R, tokens, H)."""
        assert self._sent is not None, "combine called before dispatch"
        assert not use_low_precision
        total = torch.zeros(len(self._sent), payload.shape[2])
        for target, rows in enumerate(everywhere(payload, self._group)):
            token = torch.nonzero(self._sent[:, target]).view(-1)
            total.index_add_(0, token, rows[self.rank, : len(token)].float())
        self._sent = None
        return output.copy_(total)


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
) -> int:
    """Bytes."""
    per_token = total_dispatch_payload_size_per_token + combine_payload_size_per_token
    return ep_size * max_num_tokens * per_token


@dataclass(frozen=True)
class MoEEpCommParams:
    """Sizes; ``dispatch_format`` is of activations as they are sent."""

    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: torch.dtype | None = None
    dispatch_format: Any = None
    invalid_expert_id: int = -1

    @property
    def dispatch_bytes_per_token(self) -> int:
        return self.hidden_size * _BYTES[self.dispatch_format]


@dataclass
class NVLinkOneSidedConfig:
    """Options."""

    extra_payload_bytes_per_token: int = 0
    use_low_precision_combine: bool = False
    comm_backend: Any = None


@dataclass(frozen=True)
class BootstrapConfig:
    """A rank's place."""

    world_size: int
    rank: int
    device: int | None = None
    process_group: Any = None


class NVLinkOneSidedAlltoAll:
    """One dispatch and its combine at a time; ids of all experts, for as many as ``params`` say."""

    def __init__(
        self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: NVLinkOneSidedConfig
    ) -> None:
        if params.num_experts % bootstrap.world_size:
            raise ValueError(f"num_experts ({params.num_experts}) not divisible by the EP size")
        self.params, self.config, self._tokens = params, config, 0
        size = moe_a2a_get_workspace_size_per_rank(
            bootstrap.world_size,
            params.max_tokens_per_rank,
            params.dispatch_bytes_per_token
            + 8 * params.top_k
            + config.extra_payload_bytes_per_token,
            2 * params.hidden_size,
        )
        mapping = SimpleNamespace(moe_ep_size=bootstrap.world_size)
        limits = params.max_tokens_per_rank, params.top_k, params.num_experts
        self.alltoall = MoeAlltoAll(mapping, *limits, size, config)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        max_tokens_per_rank: int,
    ) -> Any:
        """Rows (R * tokens, *), with all ids of each."""
        scales = [] if hidden_states_scale is None else [hidden_states_scale]
        payloads = [hidden_states, *scales, topk_ids, topk_weights]
        place, self._tokens = 1 + len(scales), max_tokens_per_rank
        invalid = self.params.invalid_expert_id
        found = self.alltoall.dispatch(topk_ids, payloads, max_tokens_per_rank, invalid, place)
        rows, *scale, ids, weights = [part.flatten(0, 1) for part in found]
        return SimpleNamespace(
            hidden_states=rows,
            hidden_states_scale=scale[0] if scale else None,
            topk_ids=ids,
            topk_weights=weights,
        )

    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor) -> torch.Tensor:
        payload = expert_output.view(self.alltoall.size, self._tokens, -1)
        return self.alltoall.combine(payload, self._tokens, output)

    def destroy(self) -> None:
        """The workspace stays."""


def create_communication(
    bootstrap: BootstrapConfig, params: MoEEpCommParams, backend: NVLinkOneSidedConfig
) -> NVLinkOneSidedAlltoAll:
    """For one number of experts."""
    return NVLinkOneSidedAlltoAll(bootstrap, params, backend)


def cutlass_fused_moe(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: Sequence[torch.Tensor],
    output: torch.Tensor,
    ep_size: int = 1,
    ep_rank: int = 0,
    tp_size: int = 1,
    activation_type: Any = ActivationType.Swiglu,
    **others: Any,
) -> None:
    """SwiGLU of rows by this rank's experts (L, 2 I, H), what is gated before its gate."""
    assert activation_type is ActivationType.Swiglu
    assert tp_size == 1
    assert not len(quant_scales)
    assert input.dtype == torch.bfloat16
    first = ep_rank * len(fc1_expert_weights)
    total = torch.zeros(input.shape)
    ids, weights, x = token_selected_experts.cpu(), token_final_scales.cpu().float(), input.cpu()
    for expert, (up_gate, down) in enumerate(
        zip(fc1_expert_weights, fc2_expert_weights, strict=True)
    ):
        row, k = torch.nonzero(ids == first + expert, as_tuple=True)
        if not len(row):
            continue
        up, gate = (x[row].float() @ up_gate.cpu().float().T).chunk(2, dim=-1)
        inner = (torch.nn.functional.silu(gate) * up).to(input.dtype).float()
        total.index_add_(0, row, (inner @ down.cpu().float().T) * weights[row, k, None])
    output.copy_(total)


@dataclass(frozen=True)
class FleetParams:
    """Sizes of a megakernel; experts of all ranks."""

    num_experts: int
    max_tokens_per_rank: int
    token_hidden_size: int


@dataclass(frozen=True)
class MoEWeightPack:
    """A rank's experts as in a checkpoint: (L, 2 I, H) and (L, H, I)."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None


@dataclass
class MegaKernelConfig:
    """Options of one of the kernels."""

    intermediate_size: int
    top_k: int
    gate_up_clamp: float | None = None
    activation_clamp: float | None = None
    fast_math: bool = True
    apply_topk_in_fc1: bool = True
    combine_dtype: str = "bf16"
    input_norm_const: float = 1.0
    fc1_alpha: torch.Tensor | None = None
    fc2_alpha: torch.Tensor | None = None
    fc1_norm_const: torch.Tensor | None = None
    knobs: Any = None


@dataclass
class MegaConfig:
    """A kernel, and weights in its order already where they are not to be put in it."""

    megakernel: MegaKernelConfig
    quantize_input: bool = True
    preprocess_weights: bool = True
    transformed_weights: Any = None


@dataclass
class MoEEpTensors:
    """One rank's tokens of a batch, and a number of each of its experts."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    fc1_alpha: torch.Tensor | None = None
    fc2_alpha: torch.Tensor | None = None
    fc1_norm_const: torch.Tensor | None = None


_SCALES = 4  # of an expert, alike: what its weights were divided by
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class MoEEpMegaLayer:
    """Tokens of all ranks by the experts of all, in one call.

    In the kernel's order weights are (L, in, out), transposed where they lie, with scales (L, 4).
    Those of NVFP4, two of them in a byte of (L, in / 2, out), keep their scales (L, out, in / 16).
    """

    live: list["MoEEpMegaLayer"] = []  # noqa: RUF012 one process, one list

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        fleet_params: FleetParams,
        weights: MoEWeightPack | None,
        backend: MegaConfig,
    ) -> None:
        self._bootstrap, self._fleet_params, self._mega_config = bootstrap, fleet_params, backend
        if backend.transformed_weights is None:
            assert backend.preprocess_weights
            assert weights is not None
            backend_order = (
                _transformed(weights.w13, weights.w13_scale),
                _transformed(weights.w2, weights.w2_scale),
            )
        else:
            backend_order = backend.transformed_weights
        self._transformed = backend_order
        for part, scale in self._transformed:
            assert len(part) == len(scale) == fleet_params.num_experts // bootstrap.world_size
            assert part.transpose(1, 2).is_contiguous()
            assert scale.dtype == torch.float8_e4m3fn
        self._signature: Any = None
        self.live.append(self)

    def warmup(self, t: MoEEpTensors) -> None:
        """All ranks together."""
        assert int(t.topk_ids.max()) < self._fleet_params.num_experts
        self(t)

    def __call__(self, t: MoEEpTensors) -> torch.Tensor:
        assert self in self.live, "MegaMoE layer has been destroyed"
        fleet, here = self._fleet_params, self._bootstrap.rank
        signature = t.hidden_states.dtype, t.topk_ids.dtype, t.topk_weights.dtype
        assert self._signature in (None, signature), "input signature changed"
        self._signature = signature
        assert len(t.hidden_states) <= fleet.max_tokens_per_rank
        assert int(t.topk_ids.max()) < fleet.num_experts, "an id beyond the experts"
        group, total = self._bootstrap.process_group, []
        local = fleet.num_experts // self._bootstrap.world_size
        for x, ids, weights in everywhere((t.hidden_states, t.topk_ids, t.topk_weights), group):
            output = torch.zeros(x.shape, dtype=torch.float32)
            for expert in range(local):
                row, k = torch.nonzero(ids == here * local + expert, as_tuple=True)
                if len(row):
                    output.index_add_(
                        0, row, self._expert(t, expert, x[row]) * weights[row, k, None]
                    )
            total.append(output)
        parts = everywhere(tuple(total), group)
        return sum(part[here] for part in parts).to(t.hidden_states.device, torch.bfloat16)

    def _expert(self, t: MoEEpTensors, expert: int, x: torch.Tensor) -> torch.Tensor:
        for index, alpha in enumerate((t.fc1_alpha, t.fc2_alpha)):
            weight, scale = self._transformed[index]
            x = x.float() @ _values(weight[expert].cpu(), scale[expert].cpu())
            if alpha is not None:
                assert len(alpha) == len(weight)
                x = x * alpha[expert].cpu()
            if index == 0:
                gate, up = x.chunk(2, dim=-1)
                x = torch.nn.functional.silu(gate) * up
        return x

    def destroy(self) -> None:
        """All ranks together."""
        self.live.remove(self)


def _transformed(
    weight: torch.Tensor, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if scales is not None:
        return weight.data.transpose(1, 2), scales.data
    scale = 2.0 ** (torch.arange(len(weight)) % 3)
    kept = (weight.data / scale[:, None, None]).to(weight.dtype).transpose(1, 2)
    return kept, scale[:, None].expand(-1, _SCALES).contiguous().to(torch.float8_e4m3fn)


def _values(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(in, out) float32 of one expert."""
    if weight.dtype != torch.uint8:
        return weight.float() * scale.float().mean()
    codes = torch.stack([weight.T & 15, weight.T >> 4], -1).flatten(1)
    values = torch.cat([_FP4, -_FP4])[codes.long()]
    return (values * scale.float().repeat_interleave(16, 1)).T


class _Communicator:
    """What vLLM derives its communicator from."""


def _config(comm_backend: Any) -> Any:
    return SimpleNamespace(comm_backend=comm_backend)


def _mapping(*_: Any, moe_ep_size: int, **__: Any) -> Any:
    return SimpleNamespace(moe_ep_size=moe_ep_size)


def install_flashinfer() -> None:
    """Make what vLLM uses of ``flashinfer`` for this importable, and nothing else of it."""
    put("flashinfer")
    put("flashinfer.comm", Mapping=_mapping)
    put("flashinfer.comm.mnnvl", CommBackend=_Communicator, MnnvlConfig=_config)
    put("flashinfer.fused_moe", QuantFormat=QuantFormat, cutlass_fused_moe=cutlass_fused_moe)
    put("flashinfer.fused_moe.core", ActivationType=ActivationType)
    put(
        "flashinfer.moe_ep",
        **{
            each.__name__: each
            for each in (
                *(BootstrapConfig, MoEEpCommParams, NVLinkOneSidedAlltoAll, NVLinkOneSidedConfig),
                *(FleetParams, MegaConfig, MoEEpMegaLayer, MoEEpTensors, MoEWeightPack),
                create_communication,
            )
        },
        Nvfp4CutedslMegaMoeConfig=MegaKernelConfig,
        DeepGemmMegaMoeConfig=MegaKernelConfig,
    )


def put(name: str, **members: Any) -> None:
    """Make a module importable that has these members."""
    module: Any = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
