"""The outputs that the documentation shows, all from one run of the tutorial's commands.

    python benchmarks/tutorial.py

It makes the demo's model, serves it with the installed vLLM on two ranks, and asks what the
tutorial asks. `python -m docs.generate.samples` puts the outputs into the pages.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

from ultraep_lab.demo.models import make_model
from ultraep_lab.demo.spec import ModelSpec
from ultraep_lab.demo.text import sample_text

MODEL = "results/models/demo"
FLAGS = f"vllm {MODEL} --tensor-parallel-size 2 --enable-expert-parallel --max-model-len 8192"
SERVE = f"{FLAGS} --enforce-eager --no-enable-prefix-caching"
SIDECAR = "curl -s localhost:8700"
PROMPT_TOKENS, PROMPTS = 2000, 6
WAIT_SECONDS = 300


def main() -> None:
    """Run every command in its turn, and write what each printed."""
    parser = harness.parser(__doc__, "tutorial.json")
    args = parser.parse_args()
    if not Path(MODEL, "model.safetensors").exists():
        make_model(Path(MODEL), ModelSpec())
    samples = {"doctor": printed(f"ultraep-serve doctor {FLAGS}")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with serving(log):
            wait_for(lambda: '"ready":true' in printed(f"{SIDECAR}/readyz"))
            wait_for(lambda: "data" in printed("curl -s localhost:8000/v1/models"))
            samples |= asked(Path(folder))
        lines = log.read_text().splitlines()
    kept = r"ultraep: (?:balancing|self-check).*|sidecar on.*"
    found = (re.search(kept, line) for line in lines)
    samples["log"] = "\n".join(line[0] for line in found if line)
    for name, text in samples.items():
        print(f"--- {name}\n{text}")
    harness.write(args.json, {"samples": samples})


def asked(folder: Path) -> dict[str, str]:
    """What a server that runs answers, by the names of the samples."""
    prompt, trace = folder / "prompt.json", folder / "trace.npz"
    request = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    prompt.write_text(json.dumps({**request, "prompt": sample_text("law", PROMPT_TOKENS, 1)}))
    ask = f"curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' -d @{prompt}"
    samples = {"readyz": printed(f"{SIDECAR}/readyz")}
    for _ in range(PROMPTS):
        printed(ask)
    time.sleep(2)  # records of the last batch
    samples["status"] = printed("ultraep-serve status")
    keys = "{imbalance, replicas, bytes_moved, batches}"
    samples["balance"] = printed(f"{SIDECAR}/v1/balance | jq -c '{keys}'")
    policy = 'curl -s -X POST localhost:8700/v1/control/policy -H "Authorization: Bearer $(cat '
    policy += '/dev/shm/ultraep-$(id -u)-*/token)" -H "Content-Type: application/json" -d '
    samples["policy"] = printed(f"""{policy} '{{"policy": "off"}}'""")
    printed(f"""{policy} '{{"policy": "quota"}}'""")
    record = subprocess.Popen(command(f"ultraep-serve record --out {trace} --batches 4"), **PIPED)
    time.sleep(3)
    for _ in range(PROMPTS):
        printed(ask)
    samples["record"] = record.communicate(timeout=WAIT_SECONDS)[0].strip()
    replay = f"replay {trace} --ep 2 --slots 2 --skip 0 --policies off,quota,eplb"
    samples["replay"] = printed(f"ultraep-serve {replay}")
    shown = {name: text.replace(f"{folder}/", "") for name, text in samples.items()}
    return {name: re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE) for name, text in shown.items()}


@contextmanager
def serving(log: Path) -> Iterator[None]:
    """The tutorial's server, ended afterwards."""
    with log.open("w") as out:
        server = subprocess.Popen(command(f"ultraep-serve {SERVE}"), stdout=out, stderr=out)
        try:
            yield
        finally:
            server.terminate()
            server.wait(timeout=60)


def wait_for(is_ready: Callable[[], bool]) -> None:
    """Raises TimeoutError where it does not come true."""
    end = time.monotonic() + WAIT_SECONDS
    while not is_ready():
        if time.monotonic() > end:
            raise TimeoutError("the server is not ready")
        time.sleep(1)


PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}


def printed(line: str) -> str:
    """Standard output of a shell's ``line``."""
    return str(subprocess.run(command(line), **PIPED, check=False).stdout).strip()


def command(line: str) -> list[str]:
    """A shell that finds this environment's commands and replaces itself by the last one."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made = f"exec {line}" if "|" not in line else line
    return ["env", f"PATH={path}", "COLUMNS=90", "bash", "-c", made]


if __name__ == "__main__":
    main()
