"""unpack, with few threads or many, against the columns written out."""

import pytest
import torch
from ultraep_kernels.host import unpack as kernels
from ultraep_kernels.host.unpack import COLUMNS, unpack


@pytest.mark.parametrize("most_threads", [0, 1 << 10])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_blocks", "num_inputs"), [(1, 1), (3, 70), (4, 32)])
def test_blocks_of_columns_become_a_matrix(
    num_blocks: int,
    num_inputs: int,
    dtype: torch.dtype,
    most_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "MOST_THREADS", most_threads)
    matrix = torch.randn(num_blocks * COLUMNS, num_inputs).to(dtype)
    packed = torch.empty_like(matrix)
    for block, rows in zip(packed.split(COLUMNS), matrix.split(COLUMNS), strict=True):
        block.view(-1).copy_(rows.T.reshape(-1))
    assert torch.equal(unpack(packed), matrix.T)
