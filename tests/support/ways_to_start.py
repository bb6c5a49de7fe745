"""Ways to start an engine without the launcher, each a program of its own.

    python -m tests.support.ways_to_start WAY MODEL OUT

asks the engine the same prompts with balancing on and off and writes to OUT what came of it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.support.serving_checks import MOVING_ALWAYS_PAYS, PROMPTS
from ultraep_lab.demo.balanced_server import BalancedServer
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_directory import running_run_directories
from ultraep_serve.types import Decision, Policy

SETTINGS = {"costs": MOVING_ALWAYS_PAYS.to_json()}
TOKENS, CONTEXT = 16, 4096
ENVIRONMENT = {  # what a plain CPU machine needs
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "OMP_NUM_THREADS": "1",
}
VLLM = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": CONTEXT,
}
SGLANG = {
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


class UnmodifiedServer(BalancedServer):
    """The engine's own command, with balancing and the sidecar as settings."""

    def __init__(
        self,
        model: Path,
        flags: list[str],
        log_path: Path,
        engine: str,
        environment: Callable[..., dict[str, str]],
    ) -> None:
        super().__init__(model, flags, log_path, engine)
        self._settings = {"sidecar": {"port": self.sidecar_port}}
        self._made = environment(engine, **self._settings)

    @property
    def run_path(self) -> Path:
        return run_path_of(self.process_id)

    def _wait_until_healthy(self) -> None:
        super()._wait_until_healthy()
        wait_for_sidecar(self.sidecar_url)

    def _command(self) -> list[str]:
        end = [*self._flags, "--port", str(self.port)]
        if self._engine == "sglang":
            return [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model, *end]
        setting = json.dumps({"ultraep": {**SETTINGS, **self._settings}})
        module = "vllm.entrypoints.openai.api_server"
        own = ["--model", self.model, "--additional-config", setting]
        return [sys.executable, "-m", module, *own, *end]

    def _environment(self) -> dict[str, str]:
        return self._made


def wait_for_sidecar(url: str) -> None:
    """It is started when the ranks meet, and may come up after the server."""
    for _ in range(120):
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        time.sleep(0.5)
    raise TimeoutError(f"no sidecar at {url}")


def run_path_of(process: int) -> Path:
    """The run directory of the engine whose first process this is."""
    (found,) = (path for path in running_run_directories() if f"-p{process}-" in path.name)
    return found


def on_and_off(ask: Callable[[], Texts]) -> dict[str, Any]:
    """What ``ask`` gives with balancing on and off, and what the rings say of the former."""
    run_path, on = run_path_of(os.getpid()), ask()
    balanced = balanced_layers(run_path)
    with ControlPage.open(run_path) as page:
        page.set_policy(Policy.OFF)
    return {"on": on, "off": ask(), "layers": balanced, "run_dir": str(run_path)}


def balanced_layers(run_path: Path, domain_size: int = 0) -> dict[int, list[float]]:
    """Largest imbalance before and after, by layer, of the planned batches of rank 0.

    With domains over the floor, which is that of the domains as a whole.
    """
    records = RingReader(run_path / "ring-0").poll().records
    planned = records[records["decision"] == Decision.PLANNED]
    found: dict[int, list[float]] = {}
    for layer in np.unique(planned["layer"]).tolist():
        loads = planned[planned["layer"] == layer]
        before = loads["load_before"]
        domains = before.reshape(len(loads), -1, domain_size or before.shape[1])
        floor = domains.mean(2).max(1)
        both = before, loads["load_after"]
        found[layer] = [float((load.max(1) / floor).max()) for load in both]
    return found


class Training:
    """What a program that trains adds to vLLM's workers, to send them other weights."""

    model_runner: Any

    def by_model(self) -> None:
        model = self.model_runner.model
        model.load_weights((name, tensor * 2) for name, tensor in model.state_dict().items())

    def by_runner(self) -> None:
        self.model_runner.reload_weights()

    def by_vllms_reload(self) -> None:
        from vllm.model_executor.model_loader import reload

        reload.initialize_layerwise_reload(self.model_runner.model)

    def rows(self) -> list[int]:
        """Of all experts' weights, as a program that saves them finds them."""
        found = self.model_runner.model.state_dict().items()
        return [tensor.shape[0] for name, tensor in found if name.endswith("w13_weight")]


def llm(model: str) -> dict[str, Any]:
    """With a draft model that has experts; it is the same model, so its drafts are right.

    Other weights are refused, which changes no answer.
    """
    draft = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    extension = f"{__spec__.name}.{Training.__name__}"
    ask = asker(
        model, speculative_config=draft, disable_log_stats=False, worker_extension_cls=extension
    )
    rows = ask.engine.collective_rpc("rows")  # vLLM mixes up answers behind one that is an error
    refused = [refusal_of(ask.engine, way) for way in ("by_model", "by_runner", "by_vllms_reload")]
    found = on_and_off(ask) | {"refused": refused, "rows": rows}
    counters = {metric.name: metric for metric in ask.engine.get_metrics()}
    names = ("draft_tokens", "accepted_tokens")
    found["drafts"] = [counters[f"vllm:spec_decode_num_{name}"].value for name in names]
    return found


def refusal_of(engine: Any, way: str) -> str:
    """Why its workers do not take other weights by this way."""
    try:
        engine.collective_rpc(way)
    except Exception as error:
        return str(error)
    return ""


def asker(model: str, **settings: Any) -> Any:
    """``LLM`` as ``engine``, and called: what it answers to all prompts."""
    from vllm import LLM, SamplingParams

    engine = LLM(model, **VLLM, **settings, additional_config={"ultraep": SETTINGS})
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS)

    def ask() -> Texts:
        done = engine.generate(PROMPTS, greedy, use_tqdm=False)
        return [request.outputs[0].text for request in done]

    ask.engine = engine  # type: ignore[attr-defined]
    return ask


def ray_serve(model: str) -> dict[str, Any]:
    """The two replicas of the recipe in ``deploy/ray_serve.py``; each answers all prompts."""
    import ray
    from ray import serve

    from deploy.ray_serve import Options, Replica, deployed

    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False)

    class Measured(Replica):
        def __call__(self) -> dict[str, Any]:
            found = on_and_off(lambda: self.generate(PROMPTS, TOKENS))
            with ControlPage.open(Path(found["run_dir"])) as page:
                page.set_policy(Policy.QUOTA)
            return found

    settings = {"additional_config": {"ultraep": SETTINGS}}
    replicas = deployed(Measured, Options(model=model, gpus=0))
    handle = serve.run(replicas.bind(model, **VLLM, **settings))
    # Each takes one request at a time, so that both get one of two.
    answers = [handle.remote() for _ in range(2)]
    found = [answer.result() for answer in answers]
    serve.shutdown()
    ray.shutdown()
    assert found[0]["run_dir"] != found[1]["run_dir"]
    return {**found[0], "on": found[0]["on"] + found[1]["on"], "off": 2 * found[1]["off"]}


def ray_workers(model: str) -> dict[str, Any]:
    """vLLM's own Ray workers, which find the settings in the configuration they are given.

    vLLM refuses its Ray executor on CPU, so what that does is done here: until the model is loaded.
    """
    import ray
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_open_port
    from vllm.v1.executor.ray_utils import RayWorkerWrapper

    arguments = EngineArgs(model, **VLLM, additional_config={"ultraep": SETTINGS})
    config, others = arguments.create_engine_config(), running_run_directories()
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False)
    remote = ray.remote(num_cpus=1)(RayWorkerWrapper)
    workers = [remote.remote(rpc_rank=rank) for rank in range(2)]
    shared = {
        "vllm_config": config,
        "distributed_init_method": f"tcp://127.0.0.1:{get_open_port()}",
    }
    kwargs = [
        {**shared, "local_rank": rank, "rank": rank, "is_driver_worker": rank == 0}
        for rank in range(2)
    ]
    for method, values in (("init_worker", [kwargs]), ("init_device", []), ("load_model", [])):
        ray.get([worker.execute_method.remote(method, *values) for worker in workers])
    (run_path,) = (path for path in running_run_directories() if path not in others)
    states = [RingReader(path).header().state.name for path in sorted(run_path.glob("ring-*"))]
    ray.shutdown()
    return {"states": states, "run_dir": str(run_path)}


def sglang_engine(model: str) -> dict[str, Any]:
    """With the settings in ULTRAEP_CONFIG."""
    import sglang

    engine = sglang.Engine(model_path=model, **SGLANG)
    greedy = {"temperature": 0, "max_new_tokens": TOKENS}

    def ask() -> Texts:
        return [answer["text"] for answer in engine.generate(PROMPTS, greedy)]

    found = on_and_off(ask)
    engine.shutdown()
    return found


if __name__ == "__main__":
    way, model, out = sys.argv[1:]
    Path(out).write_text(json.dumps(globals()[way](model)))
