"""combine and add_parts against torch's own operations, and add_up with few threads or many."""

import pytest
import torch
from ultraep_kernels.host import combine as kernels
from ultraep_kernels.host.combine import add_parts, combine

from ultraep_serve.engines.common.cpu_experts import Outputs, add_up

NUM_TOKENS, NUM_ROWS, HIDDEN = 40, 100, 21
BFLOAT16 = torch.bfloat16


def outputs(dtype: torch.dtype = BFLOAT16) -> Outputs:
    """Of several rows to a token and none to some, with numbers that are hard to round."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(NUM_TOKENS // 2, (NUM_ROWS,), generator=generator)
    rows = torch.randn(NUM_ROWS, HIDDEN, generator=generator)
    weights = torch.rand(NUM_ROWS, generator=generator)
    rows[0, :4] = torch.tensor([float("nan"), float("inf"), 3.4e38, 1e-40])
    weights[0] = 1.003
    weights[1] = float("nan")
    return Outputs(tokens, rows.to(dtype), weights)


def twin(given: Outputs) -> torch.Tensor:
    total = torch.zeros(NUM_TOKENS, HIDDEN)
    for token, row in zip(given.tokens.tolist(), given.weighted(BFLOAT16), strict=True):
        total[token] += row.float()
    return total


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32], ids=str)
def test_rows_are_weighted_rounded_and_added_to_the_same_bits(dtype: torch.dtype) -> None:
    given, total = outputs(dtype), torch.full((NUM_TOKENS, HIDDEN), 7.0)
    begun = combine(total, 0, *given)
    assert begun == given.tokens.max() + 1
    assert (total[begun:] == 7).all()
    total[begun:] = 0
    assert total.isnan().any()
    torch.testing.assert_close(total, twin(given), rtol=0, atol=0, equal_nan=True)


def test_rows_without_weights_are_added_as_they_are() -> None:
    given, total = outputs()._replace(weights=None), torch.ones(NUM_TOKENS, HIDDEN)
    assert combine(total, NUM_TOKENS, *given) == NUM_TOKENS
    torch.testing.assert_close(total, twin(given) + 1, rtol=1e-6, atol=0, equal_nan=True)


def test_other_types_are_refused() -> None:
    tokens, rows, weights = outputs(torch.float16)
    total = torch.zeros(NUM_TOKENS, HIDDEN)
    with pytest.raises(TypeError, match=r"torch\.float16 added to torch\.float32"):
        combine(total, 0, tokens, rows, weights)
    with pytest.raises(TypeError, match=r"added to torch\.bfloat16"):
        combine(total.bfloat16(), 0, tokens, rows.bfloat16(), weights)
    with pytest.raises(TypeError, match="rows without weights are bfloat16"):
        combine(total, 0, tokens, rows.float(), None)


@pytest.mark.parametrize("rounded_to", [BFLOAT16, torch.float16, torch.float32], ids=str)
def test_the_number_of_threads_does_not_change_sums(
    monkeypatch: pytest.MonkeyPatch, rounded_to: torch.dtype
) -> None:
    given = outputs(torch.float32)
    found = []
    for few_threads in (0, 1 << 20):
        monkeypatch.setattr(kernels, "MOST_THREADS", few_threads)
        found.append(add_up([given, given], torch.full((NUM_TOKENS, HIDDEN), 7.0), rounded_to))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 2500])
def test_parts_of_ranks_are_added_in_order_and_rounded_to_the_same_bits(
    num_ranks: int, size: int
) -> None:
    first, generator = 13, torch.Generator().manual_seed(size)
    parts = torch.randn(num_ranks, first + size + 5, generator=generator)
    parts[:, first : first + 3] = torch.tensor([float("nan"), float("inf"), 3.4e38 / num_ranks])
    total, copy = torch.full((2, size), 7, dtype=BFLOAT16)
    add_parts(parts, first, total, copy)
    expected = parts[0, first : first + size]
    for part in parts[1:]:
        expected = expected + part[first : first + size]
    for found in (total, copy):
        torch.testing.assert_close(found, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_parts_go_to_bfloat16_alone() -> None:
    total = torch.zeros(4, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"torch\.float16"):
        add_parts(torch.zeros(2, 4), 0, total, total)
