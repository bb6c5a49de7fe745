"""SGLang's own server, started where packages without a CPU build are missing.

    python -m ultraep_serve.adapters.sglang.server --model-path MODEL [engine flags]

Puts the stand-ins at the end of the path, behind real packages of the same names. Processes that
SGLang spawns take the path over from this one.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["main"]

_STANDINS = Path(__file__).with_name("cpu_standins")
_NEEDED = ("sgl_kernel", "torchvision")


def main() -> None:
    """Run SGLang's server with this process's arguments."""
    sys.path.append(str(_STANDINS))
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        sys.exit(
            f"ultraep: neither {' nor '.join(missing)} nor a stand-in in {_STANDINS}; "
            "install this package anew: deploy/setup_sglang_cpu.py"
        )
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
