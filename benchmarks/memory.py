"""Peak memory of a rank in a long batch: vLLM alone, with balancing off, and balancing.

    python benchmarks/memory.py

Each is an ``LLM`` of its own on two ranks, in float32, asked one prompt that makes one batch. vLLM
alone is tensor parallel, as it has no expert parallelism on CPUs. The peak is what Linux says of
the larger rank (VmHWM).
"""

import os
import subprocess
import sys
from pathlib import Path

import harness
import psutil
from served import model

CONTENDERS = {"stock": {}, "off": {"ultraep": {"policy": "off"}}, "quota": {"ultraep": {}}}
TOKENS = 16384
SETTINGS = {"tensor_parallel_size": 2, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
SETTINGS |= {"max_num_batched_tokens": TOKENS, "max_model_len": TOKENS + 1, "dtype": "float32"}


def main() -> None:
    """Measure each in turn and write the JSON."""
    options = harness.parser(__doc__, "memory.json").parse_args()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    peaks = {}
    for name in CONTENDERS:
        command = [sys.executable, __file__, name, str(model("wide"))]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        peaks[name] = int(done.stdout.split(b"peak ")[1].split()[0])
        print(f"{name}: {peaks[name] / 2**30:.2f} GiB", flush=True)
    harness.write(options.json, {"tokens": TOKENS, "peak_bytes_of_a_rank": peaks})


def ask(name: str, path: str) -> None:
    """Print the peak of the larger rank after one prompt."""
    from vllm import LLM, SamplingParams

    settings = SETTINGS | {"additional_config": CONTENDERS[name]}
    engine = LLM(path, enable_expert_parallel=name != "stock", **settings)
    prompt = {"prompt_token_ids": [token % 1000 for token in range(TOKENS)]}
    engine.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    pids = [process.pid for process in psutil.Process().children(recursive=True)]
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    kibibytes = max(int(text.split("VmHWM:")[1].split()[0]) for text in statuses)
    print("peak", kibibytes << 10, flush=True)


if __name__ == "__main__":
    ask(*sys.argv[1:]) if sys.argv[1:2] and sys.argv[1] in CONTENDERS else main()
