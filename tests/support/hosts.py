"""Ranks of several hosts played on one: an engine's process group, and a run directory per host."""

from pathlib import Path

import torch.distributed as dist

from ultraep_serve.balance import agreement
from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.engines.common import group as joining
from ultraep_serve.system.topology import Location


def engine_group(run_path: Path | str, rank: int, num_ranks: int) -> EngineGroup:
    """A group of all ranks as an engine would have it, over gloo; once per process."""
    place = f"file://{run_path}/store"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=num_ranks)
    group = dist.group.WORLD
    assert group is not None
    return EngineGroup(on_host=group, on_device=group)


def meet_in(path: Path | str) -> None:
    """Have this process's rank meet those of its host in ``path``, as if no other shared memory."""
    vars(agreement)["SHARED_MEMORY"] = Path(path)
    vars(joining)["meet"] = lambda *_: Path(path)


def host_path(run_path: Path, location: Location) -> Path:
    """The run directory that the launcher of this rank's host would have made."""
    path = run_path / f"host-{location.host.start}"
    path.mkdir(exist_ok=True)
    return path
