"""Ways to start an engine without the launcher, each a program of its own.

    python -m tests.support.ways_to_start WAY MODEL OUT

asks the engine the same prompts with balancing on and off and writes to OUT what came of it.
"""
# ruff: noqa: TID251 - engines as their users have them

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.serving_checks import MOVING_ALWAYS_PAYS, PROMPTS
from ultraep_serve.ring.control import ControlPage
from ultraep_serve.ring.reader import RingReader
from ultraep_serve.ring.run_directory import running_run_directories
from ultraep_serve.types import Decision, Policy

SETTINGS = {"costs": MOVING_ALWAYS_PAYS.to_json()}
TOKENS, CONTEXT = 16, 4096
_VLLM = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": CONTEXT,
}
_SGLANG = {
    "tp_size": 2,
    "ep_size": 2,
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_radix_cache": True,
    "dtype": "float32",
    "context_length": CONTEXT,
    "max_total_tokens": 2 * CONTEXT,
}

Texts = list[str]


def on_and_off(ask: Callable[[], Texts]) -> dict[str, Any]:
    """What ``ask`` gives with balancing on and off, and what the rings say of the former."""
    (run_path,) = (path for path in running_run_directories() if f"-p{os.getpid()}-" in path.name)
    on = ask()
    balanced = balanced_layers(run_path)
    with ControlPage.open(run_path) as page:
        page.set_policy(Policy.OFF)
    return {"on": on, "off": ask(), "layers": balanced, "run_dir": str(run_path)}


def balanced_layers(run_path: Path) -> dict[int, list[float]]:
    """Largest imbalance before and after, by layer, of the planned batches of rank 0."""
    records = RingReader(run_path / "ring-0").poll().records
    planned = records[records["decision"] == Decision.PLANNED]
    found: dict[int, list[float]] = {}
    for layer in np.unique(planned["layer"]).tolist():
        loads = planned[planned["layer"] == layer]
        both = (loads[name] for name in ("load_before", "load_after"))
        found[layer] = [float((load.max(1) / load.mean(1)).max()) for load in both]
    return found


def llm(model: str) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    engine = LLM(model, **_VLLM, additional_config={"ultraep": SETTINGS})
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS)

    def ask() -> Texts:
        done = engine.generate(PROMPTS, greedy, use_tqdm=False)
        return [request.outputs[0].text for request in done]

    return on_and_off(ask)


def async_llm(model: str) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS)

    async def answer(engine: AsyncLLM, prompt: str, name: str) -> str:
        text = ""
        async for request in engine.generate(prompt, greedy, name):
            text = request.outputs[0].text
        return text

    async def answers() -> Texts:
        asked = (answer(engine, text, uuid.uuid4().hex) for text in PROMPTS)
        return list(await asyncio.gather(*asked))

    async def start() -> AsyncLLM:
        arguments = AsyncEngineArgs(model, **_VLLM, additional_config={"ultraep": SETTINGS})
        return AsyncLLM.from_engine_args(arguments)

    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(start())
    found = on_and_off(lambda: loop.run_until_complete(answers()))
    engine.shutdown()
    return found


def ray_actor(model: str) -> dict[str, Any]:
    """``LLM`` in an actor, as Ray Serve and Ray Data have it."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False)

    @ray.remote(num_cpus=2)
    class Actor:
        def run(self, model: str) -> dict[str, Any]:
            return llm(model)

    actor = Actor.remote()
    found: dict[str, Any] = ray.get(actor.run.remote(model))
    ray.shutdown()
    return found


def sglang_engine(model: str) -> dict[str, Any]:
    """With the settings in ULTRAEP_CONFIG."""
    import sglang

    engine = sglang.Engine(model_path=model, **_SGLANG)
    greedy = {"temperature": 0, "max_new_tokens": TOKENS}

    def ask() -> Texts:
        return [answer["text"] for answer in engine.generate(PROMPTS, greedy)]

    found = on_and_off(ask)
    engine.shutdown()
    return found


if __name__ == "__main__":
    way, model, out = sys.argv[1:]
    Path(out).write_text(json.dumps(globals()[way](model)))
