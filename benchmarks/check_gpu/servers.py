"""A server as users start it, `ultraep-serve ENGINE`, on two ranks: asked, steered, and bereaved.

servers.py FOUND vllm|sglang

A row for each way to run batches (decode batches in CUDA graphs, and vLLM eagerly too). The server
measures its costs, but on the emulated GPU, checks itself, and samples all layers of all prefill
batches. It is asked the same prompts under `off` and `quota`, which is set over HTTP, and its page,
`/readyz` and metrics are read. Then a rank is killed: the server has to end. With one GPU both
ranks share it (``one_gpu``); SGLang gives each rank of a host its own, so there they start as those
of two hosts.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[1] / "device")]

import httpx  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from report import EMULATED, Report  # noqa: E402

from tests.support.serving_checks import MOVING_ALWAYS_PAYS  # noqa: E402
from tests.support.tiny_models import tiny_qwen3  # noqa: E402
from ultraep_lab.demo.balanced_server import (  # noqa: E402
    BalancedServer,
    check_tokens,
    generate_under,
    mixed_prompts,
)
from ultraep_lab.demo.models import make_model  # noqa: E402
from ultraep_lab.this_machine import free_port  # noqa: E402
from ultraep_serve.types import Policy  # noqa: E402

CONTEXT, SECONDS_TO_END = 4096, 60.0
ONE_GPU = Path(__file__).resolve().parent / "one_gpu"
FLAGS = {
    "vllm": [
        *("--tensor-parallel-size", "2", "--enable-expert-parallel", "--disable-custom-all-reduce"),
        *("--distributed-executor-backend", "mp", "--no-enable-prefix-caching"),
        *("--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CONTEXT)),
        *("--max-num-seqs", "16"),  # prompts
        *("--dtype", "bfloat16", "--kv-cache-memory-bytes", str(1 << 28)),
    ],
    "sglang": [
        *("--device", "cuda", "--tp-size", "2", "--ep-size", "2", "--dtype", "bfloat16"),
        *("--disable-radix-cache", "--context-length", str(CONTEXT)),
        *("--max-total-tokens", str(2 * CONTEXT), "--mem-fraction-static", "0.3"),
        *("--attention-backend", "triton", "--moe-runner-backend", "triton"),
        *("--sampling-backend", "pytorch", "--disable-custom-all-reduce"),
    ],
}
GRAPHS = (
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}'
)
WAYS = {
    "vllm": {"eager": ["--enforce-eager"], "graphs": ["--compilation-config", GRAPHS]},
    "sglang": {"graphs": ["--cuda-graph-bs-decode", "1", "2", "4", "8"]},
}
CHECKED = "--verify-every", "1", "--min-batch-tokens", "256"  # a tiny model's costs leave all alone
NOT_MEASURED = "--costs", MOVING_ALWAYS_PAYS.to_json()  # where a CPU plays the GPU
RANK_TITLES = {"vllm": "VLLM::Worker", "sglang": "sglang::scheduler"}  # of processes


class GpuServer(BalancedServer):
    """Both ranks on one GPU, where there is one."""

    start_seconds = 900.0 if EMULATED else 300.0

    def _command(self) -> list[str]:
        if torch.cuda.device_count() > 1:
            return super()._command()
        path = os.pathsep.join([str(ONE_GPU), os.environ.get("PYTHONPATH", "")])
        return ["env", f"PYTHONPATH={path}", *super()._command()]

    def kill_rank(self) -> None:
        """The last one."""
        # vLLM's engine would wait without end for another one to take its work
        title = RANK_TITLES[self._engine]
        children = psutil.Process(self.process_id).children(recursive=True)
        titles = {" ".join(each.cmdline()): each for each in children}
        ranks = [titles[name] for name in sorted(titles) if name.startswith(title)]
        ranks[-1].send_signal(signal.SIGKILL)


def main() -> None:
    """One row for every way to run batches."""
    report, engine = Report(Path(sys.argv[1])), sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        spec = replace(tiny_qwen3(), num_heads=2, head_dim=64)
        model = make_model(Path(folder, "model"), spec)
        for way, flags in WAYS[engine].items():
            log = Path(folder, f"{way}.log")
            given = [*FLAGS[engine], *flags, *CHECKED, *(NOT_MEASURED if EMULATED else ())]
            report.run(f"{engine}, {way}", serve, engine, model, given, log)
    sys.exit(not report.all_passed)


def serve(engine: str, model: Path, flags: Sequence[str], log: Path) -> dict[str, Any]:
    """What a server answers, shows, and does when a rank is gone."""
    began = time.monotonic()
    with logged(log), started(engine, model, flags, log) as servers:
        server = servers[0]
        found: dict[str, Any] = {"seconds_to_start": round(time.monotonic() - began, 1)}
        prompts = mixed_prompts(16)
        compared = check_tokens(server, prompts)
        found |= {"answers": compared.prompts, "same": compared.same}
        generate_under(server, Policy.QUOTA, [max(prompts, key=len)], max_tokens=1)
        found |= shown(server)
        found |= bereaved(*servers)
    # in bfloat16 sums in another order may change a token between two that are nearly as likely
    assert 2 * compared.same >= compared.prompts, "more than half of the answers differ"
    assert found["imbalance"]["after"] < found["imbalance"]["before"], "nothing was balanced"
    samples = found["samples"]
    assert samples["layers"], "nothing was sampled"
    assert not samples["failures"], "samples failed"
    return found


@contextmanager
def started(engine: str, model: Path, flags: list[str], log: Path) -> Iterator[list[GpuServer]]:
    """The server, and what has its other rank, where that is another."""
    if engine == "vllm" or torch.cuda.device_count() > 1:
        with GpuServer(model, flags, log, engine) as server:
            yield [server]
        return
    flags = [*flags, "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    first = GpuServer(model, [*flags, "--node-rank", "0"], log, engine)
    other_log = log.with_suffix(".other")
    second = GpuServer(model, [*flags, "--node-rank", "1"], other_log, engine, serves=False)
    with second, first:
        yield [first, second]


@contextmanager
def logged(log: Path) -> Iterator[None]:
    """The end of the server's log, where it fails."""
    try:
        yield
    except Exception:
        print(*log.read_text(errors="replace").splitlines()[-60:], sep="\n", flush=True)
        raise


def shown(server: GpuServer) -> dict[str, Any]:
    """Of the sidecar: ready, its page, and what it says of balance."""
    with httpx.Client(base_url=server.sidecar_url) as sidecar:
        for path in ("/readyz", "/", "/metrics"):
            sidecar.get(path).raise_for_status()
        balance = sidecar.get("/v1/balance").raise_for_status().json()
    imbalance = {when: balance["imbalance"][when]["mean"] for when in ("before", "after")}
    return {
        "imbalance": imbalance,
        "batches": balance["batches"],
        "self_check": balance["self_check"],
        "samples": balance["verification"],
    }


def bereaved(server: GpuServer, *others: GpuServer) -> dict[str, Any]:
    """A rank is killed while the others wait for it; seconds until the whole server has ended.

    Its exit code is the engine's: vLLM's server ends with 0 also where its engine has died.
    """
    began = time.monotonic()
    (others or (server,))[-1].kill_rank()
    asked = {"model": server.model, "prompt": "a"}
    with suppress(httpx.HTTPError):  # when nobody answers any more
        httpx.post(f"{server.url}/v1/completions", json=asked, timeout=SECONDS_TO_END)
    code = server.wait(SECONDS_TO_END)
    seconds = round(time.monotonic() - began, 1)
    return {"seconds_to_end_without_a_rank": seconds, "exit_code": code}


if __name__ == "__main__":
    main()
