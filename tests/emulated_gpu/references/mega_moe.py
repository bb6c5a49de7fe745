"""DeepGEMM's MegaMoE in plain torch, over a group's collectives: dispatch, experts and combine.

By its contract in the DeepGEMM that vLLM 0.33 brings along (``third_party/deep_gemm``):
``mega/__init__.py`` (``SymmBuffer``, ``fp8_fp4_mega_moe``, ``transform_weights_for_mega_moe``) and
``impls/sm100_fp8_fp4_mega_moe.cuh``. Expert ``e`` of ``n`` is row ``e % (n / R)`` of rank
``e // (n / R)``, and -1 is none. Tokens in FP8, ids and weights come from the symmetric buffer.
Weights are in FP4. All scales are powers of two, of 32 values each, four in an int32. A token's
outputs are rounded to bfloat16, and added in the order of its choices. What is between the two
products is left as it is, where the kernel rounds it to FP8 too. The kernel may read experts from
its start on, so they are read here before any token travels.
"""

import inspect
from typing import Any

import torch

from tests.emulated_gpu.references.deep_ep import everywhere

__all__ = [
    *("SymmBuffer", "fp8_fp4_mega_moe", "get_symm_buffer_for_mega_moe", "stage_inputs"),
    *("fp4", "values"),
]

_GROUP = 32  # values that share a scale
_UNITS = 384  # of tokens in a buffer: the kernel's least common multiple of its blocks
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class SymmBuffer:
    """What one rank stages for one launch; ``made`` has the numbers of experts, in order."""

    made: list[int] = []  # noqa: RUF012 one process, one list

    def __init__(
        self, group: Any, num_experts: int, num_tokens: int, top_k: int, hidden: int
    ) -> None:
        self.group, self.num_experts = group, num_experts
        self.num_max_tokens_per_rank = rows = -(-num_tokens // _UNITS) * _UNITS
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def room(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        self.x = room(hidden, torch.uint8).view(torch.float8_e4m3fn)
        self.x_sf = room(hidden // (4 * _GROUP), torch.int32)
        self.topk_idx, self.topk_weights = room(top_k, torch.int64), room(top_k, torch.float32)
        self.made.append(num_experts)


def get_symm_buffer_for_mega_moe(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
) -> SymmBuffer:
    """All ranks of ``group`` together."""
    assert (num_shared_experts, mma_type, activation) == (0, "fp8xfp4", "swiglu")
    sizes = everywhere((num_experts, num_max_tokens_per_rank, num_topk, hidden), group)
    assert all(size == sizes[0] for size in sizes), "ranks ask for different buffers"
    assert num_experts % len(sizes) == 0
    return SymmBuffer(group, *sizes[0])


def stage_inputs(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_idx_out: torch.Tensor,
    topk_weights_out: torch.Tensor,
    is_padding: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """vLLM's Triton kernel (``prepare_megamoe_inputs``): round tokens to FP8; drop padding."""
    groups = hidden_states.float().unflatten(1, (-1, _GROUP))
    largest = groups.abs().amax(2).clamp(min=1e-4)
    exponent = torch.ceil(torch.log2(largest / 448.0))
    x.copy_((groups / torch.exp2(exponent)[..., None]).flatten(1).to(x.dtype))
    x_sf.copy_((exponent + 127).to(torch.uint8).contiguous().view(torch.int32))
    left_out = torch.zeros(len(x), dtype=torch.bool) if is_padding is None else is_padding
    topk_idx_out.copy_(topk_ids.long().masked_fill(left_out[:, None], -1))
    topk_weights_out.copy_(topk_weights.float().masked_fill(left_out[:, None], 0))


def fp8_fp4_mega_moe(
    y: torch.Tensor,
    l1_weights: tuple[torch.Tensor, torch.Tensor],
    l2_weights: tuple[torch.Tensor, torch.Tensor],
    sym_buffer: SymmBuffer,
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """Sums ``y`` (T, H) of the experts that the first T tokens of ``sym_buffer`` chose."""
    group, tokens = sym_buffer.group, len(y)
    for weights, scales in (l1_weights, l2_weights):
        assert weights.is_contiguous()
        assert scales.transpose(1, 2).is_contiguous(), "scales are not MN-major"
    l1, l2 = (tuple(part.cpu() for part in each) for each in (l1_weights, l2_weights))
    experts = [_expert(l1, l2, row) for row in range(len(l1[0]))]
    x = values(sym_buffer.x[:tokens].cpu().float(), sym_buffer.x_sf[:tokens].cpu())
    ids = sym_buffer.topk_idx[:tokens].cpu()
    assert int(ids.max()) < sym_buffer.num_experts, "an id beyond the experts"
    sent = everywhere((x, ids, sym_buffer.topk_weights[:tokens]), group)
    assert len(experts) * len(sent) == sym_buffer.num_experts, "experts are not those of the buffer"
    here = torch.distributed.get_rank(group)
    outputs = [
        _computed(experts, here * len(experts), activation_clamp, *of_rank) for of_rank in sent
    ]
    total = torch.zeros(tokens, y.shape[1])
    parts = [given[here] for given in everywhere(tuple(outputs), group)]
    for choice in range(ids.shape[1]):
        total += sum(part[:, choice].float() for part in parts)  # all but one are nothing
    y.copy_(total)


def _computed(
    experts: list[Any],
    first: int,
    clamp: float | None,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """What ``experts``, from the global id ``first`` on, give for each choice: (T, K, H)."""
    found = torch.zeros(*ids.shape, x.shape[1], dtype=torch.bfloat16)
    for row, (gate_weight, up_weight, down) in enumerate(experts):
        for token, choice in torch.nonzero(ids == first + row).tolist():
            gate, up = gate_weight @ x[token], up_weight @ x[token]
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            output = down @ (torch.nn.functional.silu(gate) * up)
            found[token, choice] = (output * weights[token, choice]).bfloat16()
    return found


def _expert(
    l1: tuple[torch.Tensor, torch.Tensor], l2: tuple[torch.Tensor, torch.Tensor], row: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate (I, H), up (I, H) and down (H, I) in float32, of the kernel's order."""
    both = values(fp4(l1[0][row]), _rows_of_scales(l1[1][row]))
    gate_up = both.unflatten(0, (-1, 2, 8))  # eight rows of each in turn
    down = values(fp4(l2[0][row]), _rows_of_scales(l2[1][row]))
    return gate_up[:, 0].flatten(0, 1), gate_up[:, 1].flatten(0, 1), down


def _rows_of_scales(scales: torch.Tensor) -> torch.Tensor:
    """In the order of the rows they are of, from that in which the tensor core copies them."""
    return scales.reshape(-1, 32, 4, scales.shape[1]).transpose(1, 2).flatten(0, 2)


def fp4(packed: torch.Tensor) -> torch.Tensor:
    """Values (N, K) of (N, K / 2), two in a byte, the lower four bits first."""
    own = packed.view(torch.uint8)
    return torch.cat([_FP4, -_FP4])[torch.stack([own & 15, own >> 4], -1).flatten(1).long()]


def values(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``numbers`` (N, K) times the powers of two in ``scales`` (N, K / 128)."""
    exponents = scales.contiguous().view(torch.uint8).float() - 127
    return (numbers.unflatten(1, (-1, _GROUP)) * torch.exp2(exponents)[..., None]).flatten(1)


PARAMETERS = {
    function.__name__: [*inspect.signature(function).parameters]
    for function in (get_symm_buffer_for_mega_moe, fp8_fp4_mega_moe)
}
