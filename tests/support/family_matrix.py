"""Which model families an engine serves balanced on CPU: one row per family, with a verdict.

balanced    every MoE layer balanced, and the answers of the same model without balancing
refused     ultraep_serve ends the start with a reason, before any request; the engine alone serves
unserved    the engine alone does not serve it on CPU, with its own reason
failed      anything else: to be mended
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.families import FAMILIES, Family, make_family
from tests.support.family_run import settings
from tests.support.ways_to_start import ENVIRONMENT

__all__ = ["measure_family"]

MAX_AFTER = 1.02  # imbalance of every batch and layer
MAX_LOGPROB_DIFFERENCE = 1e-4  # float32
_TIMEOUT_SECONDS = 900.0
_REFUSAL = "ultraep: error: "
_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception)): +(\S.*)")
_MAX_REASON = 300  # characters

Row = dict[str, Any]


def measure_family(engine: str, name: str, directory: Path) -> Row:
    """Serve a family's tiny checkpoint on two ranks and say what came of it.

    ``directory`` keeps checkpoints and logs.
    """
    family = FAMILIES[name]
    model = directory / name.replace(" ", "-")
    if not (model / "config.json").exists():
        make_family(model, name)
    row: Row = {"family": name, "dtype": family.dtype, "moe_layers": family.num_moe_layers}
    found = _run(engine, name, model)
    if isinstance(found, dict):
        problems = _problems(family, found)
        verdict = "failed" if problems else "balanced"
        return {**row, "verdict": verdict, "reason": "; ".join(problems), **found}
    stock = _run(engine, name, model, "--stock")
    if isinstance(stock, str):
        return {**row, "verdict": "unserved", "reason": stock, "with_balancing": found}
    verdict = "refused" if found.startswith(_REFUSAL) else "failed"
    return {**row, "verdict": verdict, "reason": found.removeprefix(_REFUSAL)}


def _run(engine: str, name: str, model: Path, *options: str) -> Row | str:
    """What the program wrote, or why it ended before."""
    out = model.with_name(f"{model.name}-{engine}{''.join(options)}.json")
    log = out.with_suffix(".log")
    out.unlink(missing_ok=True)
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if engine == "sglang" and not options:
        environment["ULTRAEP_CONFIG"] = json.dumps(settings(FAMILIES[name]))
    command = [sys.executable, "-m", "tests.support.family_run", engine, name]
    command += [str(model), str(out), *options]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            status = process.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    if status == 0 and out.exists():
        written: Row = json.loads(out.read_text())
        return written
    return _reason(log.read_text(errors="replace"), status)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it started and left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(log: str, status: int | None) -> str:
    """Our refusal, which comes last; else the first error, which later ones follow from."""
    for line in reversed(log.splitlines()):
        if line.startswith(_REFUSAL):
            return line
    ended = "no answer in time" if status is None else f"ended with status {status}"
    found = _ERROR.search(log)
    return f"{found[1]}: {found[2]}"[:_MAX_REASON] if found else ended


def _problems(family: Family, found: Row) -> list[str]:
    """What of a run that answered contradicts "balanced"."""
    layers, quota, control = found["layers"], found["quota"], found["control"]
    problems = []
    if not len(layers) == found["registered_layers"] == family.num_moe_layers:
        problems.append(
            f"{len(layers)} of {family.num_moe_layers} MoE layers balanced, "
            f"{found['registered_layers']} registered"
        )
    if layers and (worst := max(after for _, after in layers.values())) > MAX_AFTER:
        problems.append(f"imbalance {worst:.3f} after balancing")
    if family.dtype == "float32":
        if quota["same_tokens"] < quota["prompts"]:
            problems.append(f"tokens differ in {quota['prompts'] - quota['same_tokens']} prompts")
        if quota["logprobs"] > MAX_LOGPROB_DIFFERENCE:
            problems.append(f"log-probabilities differ by {quota['logprobs']:.1e}")
    elif quota["same_tokens"] < control["same_tokens"]:
        problems.append(f"tokens differ in {quota['prompts'] - quota['same_tokens']} prompts")
    return problems
