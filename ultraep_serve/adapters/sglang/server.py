"""SGLang's own server, started where packages without a CPU build are missing.

    python -m ultraep_serve.adapters.sglang.server --model-path MODEL [engine flags]

Puts the stand-ins at the end of the path, behind real packages of the same names. Processes that
SGLang spawns take the path over from this one.
"""

import runpy
import sys
from pathlib import Path

__all__ = ["main"]

_STANDINS = Path(__file__).with_name("cpu_standins")


def main() -> None:
    """Run SGLang's server with this process's arguments."""
    sys.path.append(str(_STANDINS))
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
