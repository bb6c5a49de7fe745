"""How rows cross domains: gathered from all ranks, through the engine's own process group.

Inside a domain the fabric's exchange is the fence, and faster to notice a rank that died; what is
gathered here adds the rows of the ranks whose memory this one cannot reach.
"""

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import Store

from ultraep_serve.errors import PeerTimeoutError

# torch 2.13 calls it by another name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class EngineGroup:
    """The engine's own process groups of all ranks, by where tensors lie."""

    on_host: dist.ProcessGroup
    on_device: dist.ProcessGroup
    store: Store | None = None  # shared by the ranks of all pipeline stages


def all_gather_rows(
    group: dist.ProcessGroup, row: NDArray[np.int64], seconds: float
) -> NDArray[np.int64]:
    """All ranks' rows (R, W) int64 for this rank's ``row`` (W,), in host memory.

    Raises PeerTimeoutError when a rank is gone, or does not answer in ``seconds``.
    """
    mine = torch.from_numpy(np.ascontiguousarray(row))
    rows = mine.new_empty(group.size() * row.size)  # gloo takes no second dimension
    try:
        work = _all_gather(rows, mine, group=group, async_op=True)
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise _lost(group, f"within {seconds:g} s", error) from error
    return rows.view(-1, row.size).numpy()


def gather_bytes(group: dist.ProcessGroup, data: bytes, seconds: float) -> list[bytes]:
    """All ranks' ``data`` by rank, of whatever length. Raises as ``all_gather_rows``."""
    sizes = all_gather_rows(group, np.array([len(data)], np.int64), seconds)[:, 0].tolist()
    row = np.zeros(-(-max(sizes) // 8), np.int64)
    row.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    rows = all_gather_rows(group, row, seconds)
    return [row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]


class DeviceAllGather:
    """Gathers rows in stream order, for which the host does not wait; any of it can be captured.

    A rank that is gone is noticed by the engine's own group, after the engine's own time: its
    dispatch waits for that rank no less.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        """Have ``rows`` (R, W) hold every rank's ``row`` (W,), on its device.

        Raises PeerTimeoutError where the group says that a rank is gone.
        """
        try:
            _all_gather(rows.view(-1), row, group=self._group)
        except RuntimeError as error:
            raise _lost(self._group, "any more", error) from error


def _lost(group: dist.ProcessGroup, when: str, error: RuntimeError) -> PeerTimeoutError:
    reason = str(error).splitlines()[0]
    return PeerTimeoutError(
        f"rank {group.rank()} waits for rows of other domains: a rank did not answer {when} "
        f"({reason}); restart the engine on all hosts"
    )
