"""Time to first token of a server whose routers choose the recorded experts of real traffic.

    python benchmarks/routed.py --traces DIR

Two ranks: off, quota and ideal. DIR has law.npz and intent.npz: ``topk_ids`` uint8
[tokens, layers, K], in the order of the text. Each recorded token is a word of a checkpoint whose
routers route it as recorded (``ultraep_lab.demo.recorded``); a prompt is a slice of a trace, and
that of ``switch`` a slice of law followed by one of intent. Batches have 4096 tokens, so that those
of two such slices are two batches. Loads that the server records are compared with the slice's.
"""

import argparse
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray
from served import WORK, add_server_flags, new_records, serve

from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.prefill import LengthResult, balanced_orders
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.balanced_server import BalancedServer, installed_engine
from ultraep_lab.demo.recorded import RecordedSpec, make_recorded_model, recorded_text
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy

TRACES = ("law", "intent")
WORKLOADS = (*TRACES, "switch")
POLICIES = (Policy.OFF, Policy.QUOTA, Policy.IDEAL)
BATCH_TOKENS = 4096
WARM_UP = 2  # requests per policy, workload and length


def main() -> None:
    """Serve, measure, write the JSON."""
    parser = harness.parser(__doc__)
    add_server_flags(parser)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the recordings")
    parser.add_argument("--layers", type=int, default=8, help="of the recorded, evenly chosen")
    parser.add_argument("--prompt-tokens", type=harness.numbers, default=(4096,))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    engine = installed_engine()
    recorded = Recorded.read(options.traces, options.layers)
    document = {
        "engine": engine,
        "dtype": options.dtype,
        "layers": list(recorded.layers),
        **ttft(options, recorded, engine),
    }
    suffix = {"vllm": "", "sglang": "-sglang"}[engine]
    path = Path("benchmarks/results") / f"real-routing-ttft{suffix}.json"
    harness.write(options.json or path, document)


@dataclass(frozen=True)
class Recorded:
    """Recorded ids of some layers: all traces one after another."""

    layers: tuple[int, ...]
    ids: NDArray[np.uint8]  # (N, layers, K)
    starts: Mapping[str, range]  # tokens of each trace

    @classmethod
    def read(cls, folder: Path, num_layers: int) -> "Recorded":
        """``num_layers`` evenly chosen layers of the traces in ``folder``."""
        traces = {}
        for name in TRACES:
            with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
                traces[name] = arrays["topk_ids"]
        last = traces[TRACES[0]].shape[1] - 1
        layers = np.linspace(0, last, num_layers).round().astype(int)
        starts, end = {}, 0
        for name, ids in traces.items():
            starts[name] = range(end, end + len(ids))
            end += len(ids)
        ids = np.concatenate(list(traces.values()))[:, layers]
        return cls(tuple(layers.tolist()), ids, starts)

    def model(self, spec: RecordedSpec) -> Path:
        """The checkpoint, made on first use."""
        made = WORK / "models" / f"recorded-{len(self.layers)}"
        if not (made / "model.safetensors").exists():
            make_recorded_model(made, self.ids, spec)
        return made

    def prompt(self, workload: str, length: int, chooser: random.Random) -> NDArray[np.int64]:
        """``length`` recorded tokens in their order, from a random place of each trace."""
        if workload == "switch":
            return np.concatenate([self.prompt(name, length, chooser) for name in TRACES])
        tokens = self.starts[workload]
        start = chooser.randrange(len(tokens) - length + 1)
        return np.arange(tokens.start, tokens.stop)[start : start + length]

    def load(self, tokens: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
        """Assignments (layers, E) of ``tokens`` as recorded."""
        chosen = self.ids[tokens].swapaxes(0, 1).reshape(len(self.layers), -1)
        return np.stack([np.bincount(layer, minlength=num_experts) for layer in chosen])


class RecordCheck:
    """Compares the loads that a server records with those of the prompts, and adds them up."""

    def __init__(self, running: BalancedServer, recorded: Recorded, num_experts: int) -> None:
        self._reader = RingReader(RunFiles(running.run_path).ring(0))
        self._recorded, self._num_experts = recorded, num_experts
        self.assignments = self.differing = 0
        self._sums: dict[tuple[str, str], NDArray[np.float64]] = {}  # of busiest and mean

    def start(self) -> None:
        """Forget what is recorded of the answers up to now."""
        new_records([self._reader])

    def add(self, workload: str, policy: Policy, tokens: NDArray[np.int64]) -> None:
        """Count the batches of the prompt that was just answered."""
        (records,) = new_records([self._reader])
        wanted = self._recorded.load(tokens, self._num_experts)
        found = np.zeros_like(wanted)
        np.add.at(found, records["layer"], records["expert_load"])
        self.assignments += int(wanted.sum())
        self.differing += int(np.abs(found - wanted).sum())
        for name in ("load_before", "load_after"):
            loads = records[name]
            key = (workload, "before" if name == "load_before" else policy.value)
            sums = np.array([loads.max(axis=1).sum(), loads.mean(axis=1).sum()])
            self._sums[key] = self._sums.get(key, np.zeros(2)) + sums

    def imbalance(self, workload: str) -> dict[str, float]:
        """Busiest rank over the mean, summed over batches and layers; before and by policy."""
        mine = {key[1]: sums for key, sums in self._sums.items() if key[0] == workload}
        return {name: float(busiest / mean) for name, (busiest, mean) in mine.items()}

    def to_json(self) -> dict[str, int]:
        """Assignments that were compared, and how many the server recorded otherwise."""
        return {"assignments": self.assignments, "differing": self.differing}


def ttft(options: argparse.Namespace, recorded: Recorded, engine: str) -> dict[str, Any]:
    """Time to first token of all policies, which take turns with the same prompts."""
    spec, rows = RecordedSpec(), []
    flag = {"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size"}[engine]
    flags = ("--allow-ideal", flag, str(BATCH_TOKENS))
    with (
        serve(options, recorded.model(spec), options.dtype, *flags) as running,
        Server(running.url) as server,
        Sidecar(running.sidecar_url, running.token) as sidecar,
    ):
        check = RecordCheck(running, recorded, spec.num_experts)
        rounds = Rounds(server, sidecar, recorded, check)
        for length in options.prompt_tokens:
            for workload in WORKLOADS:
                samples = rounds.measure(workload, length, options.repeats)
                tokens = length * (len(TRACES) if workload == "switch" else 1)
                result = LengthResult(tokens, tokens, samples)
                rows.append({"workload": workload, **result.to_json()})
                print(rows[-1]["workload"], tokens, rows[-1]["paired"], flush=True)
        imbalance = {workload: check.imbalance(workload) for workload in WORKLOADS}
    return {"rows": rows, "imbalance": imbalance, "routing": check.to_json()}


class Rounds:
    """Requests under all policies in turn; those of a round have the same prompt."""

    def __init__(
        self, server: Server, sidecar: Sidecar, recorded: Recorded, check: RecordCheck
    ) -> None:
        self._server, self._sidecar = server, sidecar
        self._recorded, self._check = recorded, check
        self._chooser = random.Random(0)

    def measure(self, workload: str, length: int, repeats: int) -> dict[Policy, list[float]]:
        """Seconds to the first token by policy, one per round."""
        orders = balanced_orders(POLICIES)
        self._chooser.shuffle(orders)
        samples: dict[Policy, list[float]] = {policy: [] for policy in POLICIES}
        for number in range(-WARM_UP, repeats):
            tokens = self._recorded.prompt(workload, length, self._chooser)
            for policy in orders[number % len(orders)]:
                self._sidecar.set_policy(policy)
                self._check.start()
                result = self._server.first_token(recorded_text(tokens))
                assert result.prompt_tokens == len(tokens), "each word is one token"
                if policy is not Policy.OFF:
                    self._check.add(workload, policy, tokens)
                if number >= 0:
                    samples[policy].append(result.seconds)
        return samples


if __name__ == "__main__":
    main()
