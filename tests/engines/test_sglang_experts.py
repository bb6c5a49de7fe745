"""Experts on CPU for SGLang: what one rank adds, whatever number of rows an expert gets."""

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: deploy/setup_sglang_cpu.py")

from ultraep_serve.adapters.sglang.cpu_experts import compute_and_reduce

ROWS = (0, 1, 15, 16, 17, 255, 256, 257, 273, 700)  # around the numbers that are rounded


def test_every_assignment_counts_once_however_many_rows_an_expert_has() -> None:
    hidden, inner, top_k = 24, 8, 2
    generator = torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(ROWS))
    ids = ids[torch.randperm(ids.numel(), generator=generator)].view(-1, top_k)
    ids[::7] = -1  # another rank's
    x = torch.randn(ids.shape[0], hidden, generator=generator)
    weights = torch.rand(ids.shape, generator=generator)
    w13 = torch.randn(len(ROWS), 2 * inner, hidden, generator=generator)
    w2 = torch.randn(len(ROWS), hidden, inner, generator=generator)

    found = compute_and_reduce(x, weights, ids.int(), w13, w2)

    expected = torch.zeros_like(x, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for k, expert in enumerate(chosen):
            if expert >= 0:
                gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
                output = w2[expert].double() @ (torch.nn.functional.silu(gate) * up)
                expected[token] += weights[token, k].double() * output
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
