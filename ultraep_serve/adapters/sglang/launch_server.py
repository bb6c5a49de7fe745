"""SGLang's own server, with what it needs to run and to be balanced checked beforehand.

    python -m ultraep_serve.adapters.sglang.launch_server --model-path MODEL [engine flags]

With ``--device cpu`` the stand-ins go to the end of the path, behind real packages of the same
names. Processes that SGLang spawns take the path over from this one.
"""

import runpy
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from ultraep_serve.adapters.sglang.launch import parse_engine_flags
from ultraep_serve.config import BalanceConfig

__all__ = ["main"]

_STANDINS = Path(__file__).with_name("cpu_standins")
_STOOD_IN_FOR = ("sgl_kernel", "torchvision")
_GROUP, _PLUGIN = "sglang.srt.plugins", "ultraep_serve"


def main() -> None:
    """Run SGLang's server with this process's arguments."""
    if parse_engine_flags(sys.argv[1:]).device == "cpu":
        _add_standins()
    if BalanceConfig.from_environment() is not None:
        _check_plugin_is_loaded()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _add_standins() -> None:
    sys.path.append(str(_STANDINS))
    if missing := [name for name in _STOOD_IN_FOR if find_spec(name) is None]:
        sys.exit(
            f"ultraep: neither {' nor '.join(missing)} nor a stand-in in {_STANDINS}; "
            "install this package anew: deploy/setup_sglang_cpu.py"
        )


def _check_plugin_is_loaded() -> None:
    """SGLang goes on without plugins that it does not find or that its user did not name."""
    if not entry_points(group=_GROUP, name=_PLUGIN):
        sys.exit(
            f"ultraep: this package is installed without its entry point in {_GROUP}; "
            "install it anew: pip install ultraep-serve[sglang], on CPU deploy/setup_sglang_cpu.py"
        )
    from sglang.srt.environ import envs

    named = envs.SGLANG_PLUGINS.get()
    if named and _PLUGIN not in [name.strip() for name in named.split(",")]:
        sys.exit(f"ultraep: SGLANG_PLUGINS = {named!r} leaves {_PLUGIN} out; add it, or unset it")


if __name__ == "__main__":
    main()
