"""Engines' tuned settings of their Triton expert kernels, under the number of experts seen here.

An engine looks such a file up by how many experts' weights a rank has, ``E=64,N=...json``. Replica
slots stand beside a rank's own experts, so it would look for ``E=66`` and find none.
"""

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TunedKernels", "link_tuned_kernels"]

_EXPERTS = re.compile(r"E=(\d+),")


@dataclass(frozen=True)
class TunedKernels:
    """Where an engine has its files, and how it is told of others."""

    variable: str  # of the environment, with the folder to look in
    folder: Path
    slot_sets: int = 1  # one for every micro-batch that may overlap


def link_tuned_kernels(tuned: TunedKernels, num_slots: int, target: Path) -> dict[str, str]:
    """Have in ``target`` all files of the engine, and again by the experts that slots make of them.

    A file that the engine has for just so many experts stays as it is. The environment that makes
    the engine look there; empty where it has no such files. Raises OSError.
    """
    extra = num_slots * tuned.slot_sets
    files = {path.relative_to(tuned.folder): path for path in tuned.folder.rglob("*.json")}
    for name, path in list(files.items()):
        if found := _EXPERTS.match(name.name):
            more = f"E={int(found[1]) + extra},{name.name[found.end() :]}"
            files.setdefault(name.with_name(more), path)
    for name, path in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to(path)
    return {tuned.variable: str(target)} if files else {}
