"""``deep_gemm`` as SGLang calls it for experts in BF16 behind DeepEP's dispatches: by expert."""

import torch

from tests.emulated_gpu.operators.host import in_stream
from tests.emulated_gpu.references.contract import refusing
from tests.emulated_gpu.references.flashinfer import put

__all__ = ["install_deep_gemm"]

ALIGNMENT = 128  # of each expert's first row


@in_stream
def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, m_indices: torch.Tensor
) -> None:
    """Rows of ``a`` (M, K) times their experts' (E, N, K), into ``d`` (M, N); -1 is no expert."""
    for expert in range(len(b)):
        rows = torch.nonzero(m_indices == expert).view(-1)
        assert not len(rows) or int(rows[0]) % ALIGNMENT == 0
        d[rows] = (a[rows].float() @ b[expert].float().T).to(d.dtype)


@in_stream
def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, masked_m: torch.Tensor, _expected_m: int
) -> None:
    """The first ``masked_m`` (E,) rows of each expert's ``a`` (E, M, K) times its (N, K)."""
    for expert, count in enumerate(masked_m.tolist()):
        d[expert, :count] = (a[expert, :count].float() @ b[expert].float().T).to(d.dtype)


def install_deep_gemm() -> None:
    """Make what SGLang calls of it importable."""
    put(
        "deep_gemm",
        m_grouped_bf16_gemm_nt_contiguous=m_grouped_bf16_gemm_nt_contiguous,
        m_grouped_bf16_gemm_nt_masked=m_grouped_bf16_gemm_nt_masked,
        get_mk_alignment_for_contiguous_layout=lambda: ALIGNMENT,
    )
    put("deep_gemm.utils")
    layout = "get_mn_major_tma_aligned_tensor"
    put("deep_gemm.utils.layout", **{layout: refusing(layout)})
