"""`ultraep-serve replay`: what each policy would have made of a recorded workload."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from rich.console import Group, RenderableType
from rich.text import Text

from ultraep_lab.arguments import (
    JsonFile,
    counted,
    prepare_outputs,
    show,
)
from ultraep_lab.comparators import POLICIES, policy_function
from ultraep_lab.errors import PlanError
from ultraep_lab.machines import (
    HARDWARE,
    MODELS,
    estimated_costs,
    measured_costs,
    model_sizes,
)
from ultraep_lab.replay import replay
from ultraep_lab.replay_options import ReplayOptions
from ultraep_lab.replay_output import replay_document
from ultraep_lab.store import load_trace
from ultraep_lab.tables import figures_table
from ultraep_lab.trace import DECODE, PREFILL, LoadTrace, Trace, in_order, of_phase
from ultraep_lab.verdict import SLOT_MEMORY, Verdict, chosen, judge, words
from ultraep_lab.words import Each, Listed
from ultraep_serve.costs.model import CostModel
from ultraep_serve.system.settings import Settings

SUMMARIES = "; ".join(f"{policy.name}: {policy.summary}" for policy in POLICIES.values())


class ReplayFlags(Settings):
    """What `replay` takes beside ``ReplayOptions``."""

    policies: Annotated[tuple[str, ...], Listed, Each] = Field(
        min_length=1,
        description="policies to compare; may be repeated. FILE.py:NAME is a function of your own, "
        f"quota-every-N is quota planned in every Nth batch only. {SUMMARIES}",
        json_schema_extra={"metavar": "NAME,...", "action": "append", "also": ["--policy"]},
    )
    phase: Literal["prefill", "decode", "all"] = Field(
        default="prefill", description="what to replay, where the trace has phases"
    )
    num_experts: int | None = Field(
        default=None,
        validation_alias="experts",
        ge=1,
        description="experts of the model, if the trace does not say",
    )
    json_file: JsonFile = None


class MachineFlags(Settings):
    """Where the replayed workload would be served."""

    costs: Path | None = Field(
        default=None,
        description="say whether balancing pays, by these costs: what `status --json` printed, the "
        "log of a server that measured them, or a JSON file of a cost model",
    )
    hardware: Literal["h100", "h200", "gb200"] | None = Field(
        default=None,
        description="the same by the data sheet of GPUs; domains have as many ranks as NVLink "
        "joins, unless --domain-size says otherwise",
    )
    model: str | None = Field(
        default=None,
        validation_alias="model_config",
        json_schema_extra={"metavar": "MODEL"},
        description="of which model, with --hardware: a Hugging Face config.json or its directory, "
        f"or one of {', '.join(MODELS)}",
    )
    weights: Literal["bf16", "fp8", "fp4"] = Field(
        default="bf16", description="type of its experts' weights, with --hardware"
    )

    @model_validator(mode="after")
    def _one_source(self) -> "MachineFlags":
        if (self.hardware is None) != (self.model is None):
            raise ValueError("--hardware and --model-config go together")
        if self.costs is not None and self.hardware is not None:
            raise ValueError("--costs and --hardware exclude each other: give one of them")
        return self

    def cost_model(self, num_ranks: int) -> CostModel | None:
        """None where nothing is said of the machine. Raises ConfigError for bad files."""
        if self.costs is not None:
            return measured_costs(self.costs)
        if self.hardware is None or self.model is None:
            return None
        sizes, hardware = model_sizes(self.model), HARDWARE[self.hardware]
        return estimated_costs(sizes, hardware, self.weights, num_ranks)

    def in_domains(self, options: ReplayOptions) -> ReplayOptions:
        """``options`` with domains of the hardware, where they say nothing of domains."""
        if self.hardware is None or options.domain_size is not None:
            return options
        size = HARDWARE[self.hardware].domain_size
        return options.model_copy(
            update={"domain_size": size if size < options.num_ranks else None}
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, and the flags of ``ReplayFlags``, ``ReplayOptions`` and ``MachineFlags``."""
    parser.description = (
        "Plan every layer of every batch of a trace with each policy, and compare. With --costs or "
        "--hardware, say at the end whether balancing pays. No server and no GPU is needed."
    )
    traces = "recorded trace (.npz); several are replayed in order"
    parser.add_argument("trace", type=Path, metavar="TRACE", nargs="+", help=traces)
    ReplayFlags.add_flags(parser)
    ReplayOptions.add_flags(parser)
    MachineFlags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay, write the files, print a table; 1 where a policy makes a plan that breaks a rule.

    Raises UltraEPError with what to do.
    """
    flags, machine = ReplayFlags.from_flags(arguments), MachineFlags.from_flags(arguments)
    options = machine.in_domains(ReplayOptions.from_flags(arguments))
    costs = machine.cost_model(options.num_ranks)
    policies = [policy_function(name) for name in flags.policies]
    prepare_outputs(flags.json_file)
    traces = [load_trace(path, num_experts=flags.num_experts) for path in arguments.trace]
    if flags.phase != "all":
        phase = PREFILL if flags.phase == "prefill" else DECODE
        traces = [of_phase(trace, phase) for trace in traces]
    trace = in_order(traces, options.batch_tokens)
    try:
        result = replay(trace, options, policies, None if costs is None else costs.integer_costs())
    except PlanError as error:
        print(f"ultraep-serve: error: {error}", file=sys.stderr)
        return 1
    document = replay_document(result, options, ", ".join(path.name for path in arguments.trace))
    verdicts = [] if costs is None else _verdicts(trace, options, costs)
    if verdicts:
        document["verdict"] = {
            "recommended": {
                name: getattr(chosen(verdicts), name) for name in ("slots", "slot_memory")
            },
            "choices": [verdict.to_json() for verdict in verdicts],
        }
    top_k = trace.topk_ids.shape[2] if isinstance(trace, Trace) else None
    show(document, _view(document, words(verdicts, top_k) if verdicts else ()), flags.json_file)
    return 0


def _verdicts(trace: Trace | LoadTrace, options: ReplayOptions, costs: CostModel) -> list[Verdict]:
    """Of one slot per rank and of as many as ``options`` say, shared and of each layer's own."""
    served, verdicts = [POLICIES[name] for name in SLOT_MEMORY], []
    for slots in sorted({1, max(1, options.num_slots)}):
        chosen_slots = options.model_copy(update={"num_slots": slots})
        result = replay(trace, chosen_slots, served, costs.integer_costs())
        verdicts += [judge(result, name, costs) for name in SLOT_MEMORY]
    return verdicts


def _view(document: dict[str, Any], verdict: Sequence[str]) -> RenderableType:
    """The document as a table for a terminal of 80 characters."""
    by_time = "speeds" in document
    kind = "time_" if by_time else ""
    first = next(iter(document["policies"].values()))[f"{kind}imbalance_before"]
    trace = document["trace"]
    head = Text(f"{trace['file']}: EP{document['ep']}, {document['slots']} slots, ")
    batches = counted(document["batches"], "batch", "batches")
    head.append(f"{batches} of {counted(trace['layers'], 'layer', 'layers')}")
    if trace["skipped"]:
        skipped = counted(trace["skipped"], "batch", "batches")
        head.append(f"; {skipped} before them only as history")
    head.append("\n")
    if by_time:
        head.append(f"speeds {', '.join(f'{speed:.2g}' for speed in document['speeds'])}\n")
    head.append(f"busiest rank over mean{' of time' * by_time} without balancing: ")
    head.append(f"{first['mean']:.3f} (worst {first['max']:.3f})")
    if "floor" in document:
        floor = document[f"{kind}floor"]
        head.append(f"\nlowest possible in domains of {trace['domain']} ranks: {floor['mean']:.3f}")
        head.append(f" (worst {floor['max']:.3f})")
    second = "counts" if by_time else "p50"  # the mean of assignments, where the rest is of time
    heads = ("policy", "mean", second, "p99", "worst", "copies", "slots", "remote", "plan p50")
    table = figures_table(heads, texts=("policy",))
    for name, row in document["policies"].items():
        after = row[f"{kind}imbalance_after"]
        beside = row["imbalance_after"]["mean"] if by_time else after["p50"]
        table.add_row(
            name,
            *(f"{value:.3f}" for value in (after["mean"], beside, after["p99"], after["max"])),
            f"{row['replicas']['mean']:.1f}",
            str(row["slots_needed"]),
            f"{row['remote_fraction']:.1%}",
            _time(row["plan_seconds"]["p50"]),
        )
    return Group(head, table, *verdict)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
