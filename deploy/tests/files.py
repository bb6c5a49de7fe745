"""Where things are, and tools run as a user would."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1]
ROOT = DEPLOY.parent
RULES = DEPLOY / "prometheus" / "rules.yml"
COMPOSE = DEPLOY / "compose.yaml"
COMPOSE_GPUS = DEPLOY / "compose.gpus.yaml"
DASHBOARD = DEPLOY / "grafana" / "ultraep.json"
BIN = Path(sys.executable).parent  # where pip put programs


def run(*command: str | Path) -> str:
    """Output of ``command``, which must succeed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def read_yaml(path: Path) -> Any:
    """The only document of ``path``."""
    return yaml.safe_load(path.read_text())


def dashboard() -> dict[str, Any]:
    """Grafana's dashboard."""
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def rules() -> list[dict[str, Any]]:
    """Every alert rule."""
    return [rule for group in read_yaml(RULES)["groups"] for rule in group["rules"]]
