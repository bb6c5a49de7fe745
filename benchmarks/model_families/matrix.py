"""Which model families an engine serves balanced on CPU: one row per family, with a verdict.

balanced    every MoE layer balanced, and the answers of the same model without balancing; the
            full self-check passed, and no sample of any layer failed
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

import torch

from benchmarks.model_families.checkpoints import FAMILIES, Family, make_family
from benchmarks.model_families.run import PROMPTS, Answer, difference, settings
from tests.support.ways_to_start import ENVIRONMENT
from ultraep_lab.bench.greedy_tokens import ROUNDING, Generation

MAX_AFTER = 1.02  # imbalance of every batch and layer
WRONG = 0.5  # log-probabilities this far apart are no rounding, in any type
_TIMEOUT_SECONDS = 900.0
_REFUSAL = "ultraep: error: "
_ERROR = re.compile(  # of a traceback: an assertion without a message is its own
    r"\b((?!CalledProcess)[A-Z]\w*(?:Error|Exception)(?:: +\S.*[^:\s])?|assert \S.*)$", re.MULTILINE
)
_MAX_REASON = 300  # characters

Row = dict[str, Any]


def measure_family(engine: str, name: str, directory: Path) -> Row:
    """Serve a family's tiny checkpoint on two ranks and say what came of it.

    ``directory`` keeps checkpoints and logs.
    """
    family = FAMILIES[name]
    model = make_family(directory / name.replace(" ", "-"), name)
    dtype = family.dtype_on(engine)
    row: Row = {"family": name, "dtype": dtype, "moe_layers": family.counts.layers}
    found = _run(engine, name, model)
    if isinstance(found, str):
        stock = _run(engine, name, model, stock=2)
        if isinstance(stock, str):
            return {**row, "verdict": "unserved", "reason": stock}
        verdict = "refused" if found.startswith(_REFUSAL) else "failed"
        return {**row, "verdict": verdict, "reason": found.removeprefix(_REFUSAL)}
    answers = _answers(found.pop("answers"))
    row |= {**found, "transformers": _apart_from_transformers(answers, model, family)}
    problems = _problems(family.counts.layers, dtype, found)
    if problems and (wrong := _wrong_without_us(engine, name, model)):
        return {**row, "verdict": "unserved", "reason": wrong}
    verdict = "failed" if problems else "balanced"
    return {**row, "verdict": verdict, "reason": "; ".join(problems)}


def _wrong_without_us(engine: str, name: str, model: Path) -> str:
    """In what the engine alone, on two ranks, differs from itself on one rank."""
    one, two = (_run(engine, name, model, stock=ranks) for ranks in (1, 2))
    if isinstance(one, str) or isinstance(two, str):
        return f"the engine alone: {one if isinstance(one, str) else two}"
    apart = difference(*(_answers(found["answers"]) for found in (one, two)))["logprobs"]
    if apart < WRONG:
        return ""
    return (
        f"the engine alone answers otherwise on two ranks: log-probabilities differ by {apart:.1f}"
    )


def _apart_from_transformers(answers: list[Answer], model: Path, family: Family) -> float | None:
    """Largest difference to the log-probabilities that transformers gives, in float32.

    None where it wants weights for zero experts, which published checkpoints do not have.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        PreTrainedTokenizerFast,
    )

    if family.num_zero_experts:
        return None
    kind = AutoModelForImageTextToText if family.wrapper else AutoModelForCausalLM
    reference = kind.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    apart = 0.0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        with torch.inference_mode():
            logits = reference(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, ids[0, 1:, None]).flatten()
        apart = max(apart, float((expected - torch.tensor(answer.logprobs)).abs().max()))
    return apart


def _answers(found: list[Any]) -> list[Answer]:
    return [Answer(Generation(*made), logprobs) for made, logprobs in found]


def _run(engine: str, name: str, model: Path, stock: int = 0) -> Row | str:
    """What the program wrote, or why it ended before. ``stock`` ranks without us, if not 0."""
    out = model.with_name(f"{model.name}-{engine}{f'-stock-{stock}' if stock else ''}.json")
    log = out.with_suffix(".log")
    out.unlink(missing_ok=True)
    # One process less to start; ranks are processes of their own in any case.
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if stock == 1:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "0", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
    if engine == "sglang" and not stock:
        environment["ULTRAEP_CONFIG"] = json.dumps(settings(FAMILIES[name]))
    command = [sys.executable, "-m", "benchmarks.model_families.run", engine, name]
    command += [str(model), str(out), "--stock", str(stock)]
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
    return found[1][:_MAX_REASON] if found else ended


def _problems(num_layers: int, dtype: str, found: Row) -> list[str]:
    """What of a run that answered contradicts "balanced"."""
    layers, quota, control = found["layers"], found["quota"], found["control"]
    problems = []
    if not len(layers) == found["registered_layers"] == num_layers:
        problems.append(
            f"{len(layers)} of {num_layers} MoE layers balanced, "
            f"{found['registered_layers']} registered"
        )
    if (result := found["self_check"]["result"]) != "passed":
        problems.append(f"the self-check: {result}")
    if failures := found["verification"]["failures"]:
        problems.append(f"{failures} samples failed")
    if layers and (worst := max(after for _, after in layers.values())) > MAX_AFTER:
        problems.append(f"imbalance {worst:.3f} after balancing")
    if dtype == "float32":
        if quota["same_tokens"] < quota["prompts"]:
            problems.append(f"tokens differ in {quota['prompts'] - quota['same_tokens']} prompts")
        if quota["logprobs"] > ROUNDING:
            problems.append(f"log-probabilities differ by {quota['logprobs']:.1e}")
    elif quota["same_tokens"] < control["same_tokens"]:
        problems.append(f"tokens differ in {quota['prompts'] - quota['same_tokens']} prompts")
    return problems
