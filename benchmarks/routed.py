"""Servers whose routers choose the recorded experts of real traffic.

    python benchmarks/routed.py ttft --traces DIR   time to first token, two ranks: off, quota,
                                                    ideal, and without expert parallelism
    python benchmarks/routed.py path --traces DIR   CPU time of 2, 4, 8 and 16 ranks, and of that
                                                    the critical path: off, quota and ideal

DIR has law.npz and intent.npz: ``topk_ids`` uint8 [tokens, layers, K], in the order of the text.
Each recorded token is a word of a checkpoint whose routers route it as recorded
(``ultraep_lab.demo.recorded``); a prompt is a slice of a trace, and that of ``switch`` a
slice of law followed by one of intent. Batches have 4096 tokens, so that those of two such slices
are two batches. Loads that the server records are compared with the slice's.

``path`` measures ranks that share cores by the CPU time of their own threads
(``benchmarks/cpu_clock``); waiting for each other counts for nothing (``critical_path``).
"""

import argparse
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray
from served import CONTEXT, WORK, new_records, serve, serve_without_ep

from ultraep_lab.bench.engine import Server, ServerWithoutEP
from ultraep_lab.bench.prefill import (
    LengthResult,
    Servers,
    Turns,
    balanced_orders,
    ratios_json,
    spread_of,
)
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
CLOCK = Path(__file__).resolve().parent / "cpu_clock"


def numbers(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    return tuple(map(int, text.split(",")))


def main() -> None:
    """Run one benchmark and write its JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("benchmark", choices=("ttft", "path"))
    parser.add_argument("--traces", type=Path, required=True, help="folder of the recordings")
    parser.add_argument("--layers", type=int, default=8, help="of the recorded, evenly chosen")
    parser.add_argument("--prompt-tokens", type=numbers, default=(4096,))
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--ranks", type=numbers, default=(2, 4, 8, 16), help="of path")
    options = parser.parse_args()
    options.engine, options.mode, options.eager = installed_engine(), "tensor", False
    recorded = Recorded.read(options.traces, options.layers)
    document = {
        "engine": options.engine,
        "layers": list(recorded.layers),
        **{"ttft": ttft, "path": path}[options.benchmark](options, recorded),
    }
    suffix = {"vllm": "", "sglang": "-sglang"}[options.engine]
    name = f"real-routing-{options.benchmark}{suffix}.json"
    harness.write(options.json or Path("benchmarks/results") / name, document)


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


def batch_flags(engine: str) -> list[str]:
    """The size of batches."""
    flag = {"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size"}[engine]
    return [flag, str(BATCH_TOKENS)]


def ttft(options: argparse.Namespace, recorded: Recorded) -> dict[str, Any]:
    """Time to first token of all variants, which take turns with the same prompts."""
    spec = RecordedSpec()
    model = recorded.model(spec)
    rows = []
    with (
        serve_without_ep(options, model, "bfloat16", *batch_flags(options.engine)) as stock,
        serve(options, model, "bfloat16", "--allow-ideal", *batch_flags(options.engine)) as running,
        closing(Server(running.url)) as balanced,
        closing(Sidecar(running.sidecar_url, running.token)) as sidecar,
        closing(ServerWithoutEP(stock.url)) as plain,
    ):
        rounds = Rounds(Servers(balanced, sidecar, plain), recorded)
        check = RecordCheck(running, recorded, spec.num_experts)
        for length in options.prompt_tokens:
            for workload in options.workloads:
                samples, after_rest = rounds.measure(workload, length, options.repeats, check)
                tokens = length * (len(TRACES) if workload == "switch" else 1)
                result = LengthResult(tokens, tokens, samples, after_rest)
                rows.append({"workload": workload, **result.to_json()})
                print(workload, tokens, _summary(rows[-1]), flush=True)
        imbalance = {workload: check.imbalance(workload) for workload in options.workloads}
    print(imbalance, check.to_json())
    return {"rows": rows, "imbalance": imbalance, "routing": check.to_json()}


class Rounds:
    """Requests to all variants in turn; those of a round have the same prompt."""

    def __init__(self, servers: Servers, recorded: Recorded) -> None:
        self._servers, self._recorded = servers, recorded
        self._chooser = random.Random(0)
        self._turns = Turns()

    def measure(
        self, workload: str, length: int, repeats: int, check: RecordCheck
    ) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Seconds to the first token by variant, one per round, and of requests that woke it."""
        variants = self._servers.variants(POLICIES)
        orders = balanced_orders(variants)
        self._chooser.shuffle(orders)
        samples: dict[str, list[float]] = {variant: [] for variant in variants}
        after_rest: dict[str, list[float]] = {variant: [] for variant in variants}
        for number in range(-WARM_UP, repeats):
            tokens = self._recorded.prompt(workload, length, self._chooser)
            for variant in orders[number % len(orders)]:
                server = self._servers.ready_for(variant)
                # By the same text: no server here keeps what it has computed.
                woken = self._turns.wake(server, partial(recorded_text, tokens))
                check.start()
                result = self._turns.ask(server, recorded_text(tokens))
                assert result.prompt_tokens == len(tokens), "each word is one token"
                if variant in (Policy.QUOTA, Policy.IDEAL):
                    check.add(workload, Policy(variant), tokens)
                if number >= 0:
                    samples[variant].append(result.seconds)
                    after_rest[variant] += [woken.seconds] if woken else []
        return samples, after_rest


def _summary(row: Mapping[str, Any]) -> str:
    paired = {name: each for name, each in row["paired"].items() if each}
    times = ", ".join(f"{name} {value:.3f} s" for name, value in row["ttft_seconds"].items())
    return f"{times}; { ({name: _interval(each) for name, each in paired.items()}) }"


def _interval(ratios: Mapping[str, Any]) -> str:
    low, high = ratios["interval"] or (ratios["min"], ratios["max"])
    return f"{ratios['median']:.3f} ({low:.3f} to {high:.3f})"


def path(options: argparse.Namespace, recorded: Recorded) -> dict[str, Any]:
    """The critical path by number of ranks, workload and length."""
    rows = []
    for ranks in options.ranks:
        rows += measured_paths(options, recorded, ranks)
    return {"rows": rows}


def measured_paths(
    options: argparse.Namespace, recorded: Recorded, ranks: int
) -> list[dict[str, Any]]:
    """A row per workload and length for a server of ``ranks``, which needs no compiler."""
    spec = RecordedSpec()
    flags = ["--tensor-parallel-size", str(ranks), "--enable-expert-parallel", "--allow-ideal"]
    flags += ["--enforce-eager", "--no-enable-prefix-caching", "--dtype", "bfloat16"]
    flags += ["--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(1 << 28)]
    flags += batch_flags(options.engine)
    model, log = recorded.model(spec), WORK / f"path-{ranks}.log"
    rows = []
    with (
        event_folder() as folder,
        BalancedServer(model, flags, log, engine=options.engine) as running,
        closing(Server(running.url)) as server,
        closing(Sidecar(running.sidecar_url, running.token)) as sidecar,
    ):
        check = RecordCheck(running, recorded, spec.num_experts)
        events = Events(folder, ranks, len(recorded.layers))
        chooser = random.Random(0)
        for length in options.prompt_tokens:
            for workload in options.workloads:
                found: dict[str, list[dict[str, float]]] = {each.value: [] for each in POLICIES}
                for number in range(-1, options.repeats):
                    tokens = recorded.prompt(workload, length, chooser)
                    for policy in POLICIES if number % 2 else POLICIES[::-1]:
                        sidecar.set_policy(policy)
                        check.start()
                        events.take()
                        server.first_token(recorded_text(tokens))
                        if policy is not Policy.OFF:
                            check.add(workload, policy, tokens)
                        if number >= 0:
                            found[policy.value].append(critical_path(events.take()))
                rows.append(path_row(ranks, workload, length, found, check))
                print({key: rows[-1][key] for key in ("ranks", "workload", "milliseconds")})
                print({name: _interval(each) for name, each in rows[-1]["paired"].items()})
                print(check.imbalance(workload), check.to_json(), flush=True)
    return rows


@contextmanager
def event_folder() -> Iterator[Path]:
    """Where ranks that are started meanwhile write events, by ``cpu_clock/sitecustomize.py``."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(CLOCK), str(CLOCK.parents[1]), before.get("PYTHONPATH", "")]
        )
        os.environ["BENCHMARK_EVENTS"] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)


# One layer of one batch on one rank, as ``cpu_clock/sitecustomize.py`` writes it, in nanoseconds of
# CPU time: what comes before the sum over ranks behind attention (``before``), that sum, and what
# lies between it and routing; then the MoE layer's own stages and its sum. ``exchanged``: 1 where
# ranks waited for each other's loads. ``away``, in the layer and before it: for how long the rank
# had no core.
EVENT = np.dtype(
    [
        (name, "<i8")
        for name in (
            *("begin", "end", "count", "plan", "experts", "others"),
            *("before", "first_sum", "routing", "second_sum", "exchanged", "away", "away_before"),
        )
    ]
)


class Events:
    """What ranks have written, batch by batch."""

    def __init__(self, folder: Path, num_ranks: int, num_layers: int) -> None:
        self._folder, self._num_ranks, self._num_layers = folder, num_ranks, num_layers
        self._read = dict.fromkeys(range(num_ranks), 0)

    def take(self) -> NDArray[np.void]:
        """Events (batches, layers, ranks) since this was last asked."""
        found = []
        for rank in range(self._num_ranks):
            path = self._folder / f"rank-{rank}"
            content = path.read_bytes() if path.exists() else b""  # before its first batch
            found.append(np.frombuffer(content[self._read[rank] :], EVENT))
            self._read[rank] = len(content)
        return np.stack(found, axis=-1).reshape(-1, self._num_layers, self._num_ranks)


def critical_path(events: NDArray[np.void]) -> dict[str, float]:
    """Milliseconds of a prompt, ``events`` (batches, layers, ranks); summed over batches, layers.

    Ranks wait for each other in both sums over ranks, and for loads where these are exchanged.
    Between two such points the slowest rank counts; of the sums themselves the last to come, which
    waits for nobody. ``clock`` is the time from the first layer's routing to the end of the last,
    as it passed; ``away`` the part of it in which a rank had no core, of the rank with most of it.
    """
    routed = events["routing"] + events["count"]
    routed[:, 0] = events["count"][:, 0]  # the span begins with the first layer's routing
    computed = events["experts"] + events["others"]
    apart = routed.max(axis=2) + events["plan"].max(axis=2) + computed.max(axis=2)
    together = (routed + events["plan"] + computed).max(axis=2)
    balanced = np.where(events["exchanged"].any(axis=2), apart, together)
    moe = balanced + events["second_sum"].min(axis=2)
    attention = events["before"].max(axis=2) + events["first_sum"].min(axis=2)
    away = events["away"].max(axis=2).sum() + events["away_before"][:, 1:].max(axis=2).sum()
    parts = {
        **{name: events[name].max(axis=2).sum() for name in ("count", "plan", "experts")},
        "moe": moe.sum(),
        "attention": attention[:, 1:].sum(),
        "path": moe.sum() + attention[:, 1:].sum(),
        "clock": (events["end"][:, -1].max(axis=1) - events["begin"][:, 0].min(axis=1)).sum(),
        "away": away,
        "mean_experts": events["experts"].mean(axis=2).sum(),
    }
    return {name: float(value) / 1e6 for name, value in parts.items()}


def path_row(
    ranks: int,
    workload: str,
    length: int,
    found: Mapping[str, Sequence[Mapping[str, float]]],
    check: RecordCheck,
) -> dict[str, Any]:
    """Medians of the parts by policy, and ratios within rounds."""

    def ratios(name: str, above: str, below: str) -> dict[str, Any]:
        pairs = zip(found[above], found[below], strict=True)
        return ratios_json([one[name] / other[name] for one, other in pairs])

    return {
        "ranks": ranks,
        "workload": workload,
        "prompt_tokens": length,
        "rounds": len(found["off"]),
        "milliseconds": {
            policy: {name: spread_of([each[name] for each in of])["median"] for name in of[0]}
            for policy, of in found.items()
        },
        "paired": {
            f"{name}_{above}_over_{below}": ratios(name, above, below)
            for name in ("experts", "moe", "path")
            for above, below in (("off", "quota"), ("ideal", "quota"))
        },
        "path_over_clock": {
            policy: ratios_json([each["path"] / each["clock"] for each in of])
            for policy, of in found.items()
        },
        "imbalance": check.imbalance(workload),
        "routing": check.to_json(),
    }


if __name__ == "__main__":
    main()
