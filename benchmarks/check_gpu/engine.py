"""vLLM with a tiny model of made-up weights, balanced, asked with balancing on and off.

engine.py FOUND                                  starts the last one, once per way to run batches
engine.py FOUND FORMAT ...                       once per format of experts
engine.py rank OUT MODEL WAY RANK RANKS          one process of it

With two GPUs, or on CPU, two tensor-parallel ranks. On one GPU two data-parallel ranks share it:
each is a vLLM of its own, and NCCL, which refuses ranks on one GPU, is told that they are on two
hosts (``NCCL_HOSTID``), so that they talk over the loopback network. Experts are copied as they
always are. Nothing in it is to be timed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[1] / "device")]

import torch  # noqa: E402
from report import EMULATED, Report  # noqa: E402

from tests.support.quantised import quantise  # noqa: E402
from tests.support.serving_checks import PROMPTS  # noqa: E402
from tests.support.tiny_models import tiny_qwen3  # noqa: E402
from tests.support.ways_to_start import ENVIRONMENT, SETTINGS, VLLM, balanced_layers  # noqa: E402
from ultraep_lab.demo.models import make_model  # noqa: E402
from ultraep_lab.this_machine import free_port  # noqa: E402
from ultraep_serve.telemetry.control import ControlPage  # noqa: E402
from ultraep_serve.telemetry.run_directory import find_run  # noqa: E402
from ultraep_serve.types import Policy  # noqa: E402

RANKS = 2
# sizes that every format has
SPEC = replace(tiny_qwen3(), hidden_size=256, moe_intermediate_size=256, num_heads=2, head_dim=64)
SECONDS, SECONDS_ON_CPU = 140, 500  # of one way to run batches, the latter also on an emulated GPU
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
ON_GPU = {
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 1 << 30,  # given, vLLM does not measure what others use beside it
    "max_num_batched_tokens": 4096,
    "max_num_seqs": len(PROMPTS),
}


def main() -> None:
    """Both ways, on CPU without graphs; or formats, eagerly."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ.pop("TRITON_INTERPRET", None)  # of a dry run; vLLM for CPU has no use for it
    report = Report(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder, "model"), SPEC)
        for name in sys.argv[2:]:
            quantised = quantise(model, Path(folder, name), name)
            report.run(f"vllm, {name}", ask_both, quantised, "eager")
        if not sys.argv[2:]:
            for way in ("eager", "graphs") if has_gpu else ("eager",):
                report.run(f"vllm, {way}", ask_both, model, way)
    sys.exit(not report.all_passed)


# what is imported here asks CUDA for its devices, after which processes may not be forked
NOT_FORKED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def ask_both(model: Path, way: str) -> dict[str, Any]:
    """Answers with balancing on and off, and how loads were balanced."""
    shares_gpu = torch.cuda.device_count() == 1
    processes = RANKS if shares_gpu else 1
    with tempfile.TemporaryDirectory() as folder:
        master, started = free_port(), []
        for rank in range(processes):
            environment = {**os.environ, **ENVIRONMENT, **NOT_FORKED}
            if shares_gpu:
                environment |= sharing(rank, master)
            out = Path(folder, f"{rank}.json")
            arguments = [model, way, rank, processes]
            command = [sys.executable, __file__, "rank", out, *arguments]
            started.append(subprocess.Popen([*map(str, command)], env=environment))
        limit = SECONDS if torch.cuda.is_available() and not EMULATED else SECONDS_ON_CPU
        end = time.monotonic() + limit
        try:
            codes = [process.wait(max(1, end - time.monotonic())) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]
    same = [on == off for one in found for on, off in zip(one["on"], one["off"], strict=True)]
    layers = found[0]["layers"]
    assert layers, "no batch was balanced"
    assert all(after < before for before, after in layers.values()), layers
    # in bfloat16 sums in another order may change a token between two that are nearly as likely
    assert 2 * sum(same) >= len(same), f"{sum(same)} of {len(same)} answers are the same"
    return {
        "checked": "greedy tokens with balancing on against off",
        "ranks": f"{RANKS} on one GPU" if shares_gpu else str(RANKS),
        "answers": len(same),
        "same": sum(same),
        "imbalance_by_layer": layers,
    }


def sharing(rank: int, master: int) -> dict[str, str]:
    """Environment of a data-parallel rank that shares the GPU."""
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": "0",
        "VLLM_DP_SIZE": str(RANKS),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(master),
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def ask_as_rank(out: Path, model: str, way: str, rank: int, ranks: int) -> None:
    """Ask with balancing on, and off once all have asked; write both."""
    from vllm import LLM, SamplingParams

    settings = dict(VLLM)
    if torch.cuda.is_available():
        settings |= ON_GPU
        if way == "graphs":
            settings |= {"enforce_eager": False, "compilation_config": GRAPHS}
    if ranks > 1:
        settings["tensor_parallel_size"] = 1
    engine = LLM(model, **settings, additional_config={"ultraep": SETTINGS})
    run_path = find_run()
    greedy = SamplingParams(temperature=0, max_tokens=16)

    def ask() -> list[str]:
        done = engine.generate(PROMPTS, greedy, use_tqdm=False)
        return [request.outputs[0].text for request in done]

    found: dict[str, Any] = {"on": ask(), "layers": balanced_layers(run_path)}
    wait_for_all(out, "asked", rank, ranks)
    if rank == 0:
        with ControlPage.open(run_path) as page:
            page.set_policy(Policy.OFF)
    wait_for_all(out, "off", rank, ranks)
    found["off"] = ask()
    out.write_text(json.dumps(found))
    wait_for_all(out, "done", rank, ranks)


def wait_for_all(out: Path, what: str, rank: int, ranks: int) -> None:
    """Go on once every rank has come to the same place; whoever started us ends a long wait."""
    out.with_name(f"{what}-{rank}").touch()
    while not all(out.with_name(f"{what}-{other}").exists() for other in range(ranks)):
        time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        given, name, chosen, number, count = sys.argv[2:]
        ask_as_rank(Path(given), name, chosen, int(number), int(count))
    else:
        main()
