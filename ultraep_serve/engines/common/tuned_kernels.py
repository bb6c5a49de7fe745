"""Engines' tuned settings of their Triton expert kernels, under the number of experts seen here.

An engine looks such a file up by how many experts' weights a rank has, ``E=64,N=...json``. Replica
slots stand beside a rank's own experts, so it would look for ``E=66`` and find none.
"""

import contextlib
import functools
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ultraep_serve.system.environment import engine_variable, set_engine_variable

_EXPERTS = re.compile(r"E=(\d+),")


_OF_ENGINE = {  # variable of the environment that names a folder; the engine's own one
    "vllm": ("VLLM_TUNED_CONFIG_FOLDER", "model_executor/layers/fused_moe/configs"),
    # of which it takes configs/triton_VERSION
    "sglang": ("SGLANG_MOE_CONFIG_DIR", "srt/layers/moe/moe_runner/triton_utils"),
}


def use_tuned_kernels(engine: str, num_slots: int, target: Path) -> Callable[[], None]:
    """Have this rank's ``engine`` find its files with ``num_slots`` more experts, in ``target``.

    All ranks of a host may call this for one ``target``. A folder of the user's own stays in force.
    Returns what undoes it.
    """
    variable, folder = _OF_ENGINE.get(engine, ("", ""))
    if not variable or engine_variable(variable):
        return lambda: None
    spec = find_spec(engine)  # which imports nothing
    package = spec.submodule_search_locations if spec is not None else None
    if package and link_tuned_kernels(Path(package[0]) / folder, num_slots, target):
        set_engine_variable(variable, str(target))
    return functools.partial(set_engine_variable, variable, None)


def link_tuned_kernels(folder: Path, num_slots: int, target: Path) -> bool:
    """Have in ``target`` all files of ``folder``, and again by the experts that slots make of them.

    A file that the engine has for just so many experts stays as it is. Whether there are any files.
    """
    files = {path.relative_to(folder): path for path in folder.rglob("*.json")}
    for name, path in list(files.items()):
        if found := _EXPERTS.match(name.name):
            more = f"E={int(found[1]) + num_slots},{name.name[found.end() :]}"
            files.setdefault(name.with_name(more), path)
    for name, path in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # by another rank
            (target / name).symlink_to(path)
    return bool(files)
