"""`ultraep-serve simulate`: thousands of ranks, planned on this machine."""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator
from rich.console import Console, Group, RenderableType
from rich.progress import track
from rich.text import Text

from ultraep_lab.advise.advice import prefill_trace
from ultraep_lab.commands.machine import Hardware, MachineFlags, Model, machine_setting
from ultraep_lab.simulate.layer import Variant
from ultraep_lab.simulate.output import PERCENTILES, simulation_document
from ultraep_lab.simulate.simulation import (
    MOST_BATCHES,
    Fleet,
    Simulation,
    num_groups,
    simulate,
)
from ultraep_lab.simulate.traffic import Captured, SimulatedTraffic, Synthetic, pieces_of
from ultraep_lab.tables import figures_table
from ultraep_lab.workloads import Kind, Workload
from ultraep_serve.cli.arguments import (
    JsonFile,
    counted,
    prepare_outputs,
    show,
    write_pictures,
)
from ultraep_serve.costs.shapes import ModelShape, model_shape
from ultraep_serve.system.settings import Directory, Each, Listed, Settings, Shown

__all__ = ["SimulateFlags", "TrafficFlags", "add_arguments", "run", "simulate_fleet"]

MIB = 1 << 20
Relay = Literal["auto", "always", "never"]
KIND: Kind = "switch"  # of made-up traffic
WHEN = {"before": "before", "floor": "floor", "after": "after", "planned": "without dead links"}


class TrafficFlags(Settings):
    """The traffic of every group, recorded or made up."""

    rank_tokens: int = Field(
        default=8192, ge=1, description="tokens per rank and batch; of traces, about"
    )
    period: int = Field(
        default=50, ge=1, le=MOST_BATCHES, description="batches between changes of the traffic"
    )
    trace: tuple[Path, ...] = Field(
        default=(),
        description="recorded traces, .npz, or .parquet of loads: batches are drawn from their "
        "sequences or batches, and they take turns",
        json_schema_extra={"metavar": "FILE", "nargs": "+"},
    )
    kind: Kind | None = Field(
        default=None,
        description=f"kind of made-up traffic, as in make-trace (default: {KIND})",
    )
    imbalance: Annotated[tuple[Annotated[float, Field(ge=1)], ...] | None, Listed, Each] = Field(
        default=None,
        description="expected imbalances of made-up layers, each as frequent (default: 1.3 to 4, "
        "as far as ranks and experts can have them)",
    )
    layers: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="MoE layers of made-up traffic (default: the model's)",
    )
    experts: int | None = Field(
        default=None,
        ge=1,
        le=1 << 13,
        description="experts per layer of made-up traffic (default: the model's)",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "TrafficFlags":
        for name in ("kind", "imbalance", "layers", "experts"):
            if self.trace and getattr(self, name) is not None:
                raise ValueError(f"--{name} is for made-up traffic; leave it out with --trace")
        return self


class SimulateFlags(MachineFlags):
    """What is compared, on which machine, and where the report goes."""

    ep: Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 10)], ...], Listed, Each] = Field(
        default=(64,), min_length=1, description="ranks per group; several are compared"
    )
    slots: Annotated[tuple[Annotated[int, Field(ge=0, le=64)], ...], Listed, Each] = Field(
        default=(2,), min_length=1, description="replica slots per rank; several are compared"
    )
    domain_size: Annotated[tuple[Annotated[int, Field(ge=1)], ...] | None, Listed, Each] = Field(
        default=None,
        description="ranks per domain (default: GPUs that NVLink joins); several are compared",
    )
    relay: Annotated[tuple[Annotated[Relay, Shown("WHEN")], ...], Listed, Each] = Field(
        default=("auto",),
        min_length=1,
        description="whether ranks forward experts: auto, always, never; several are compared",
    )
    hardware: Hardware = "gb200"
    model: Model = "deepseek-v3"
    processes: int = Field(
        default=os.cpu_count() or 1,
        ge=1,
        le=256,
        description="processes that work (default: cores)",
    )
    json_file: JsonFile = None
    plots: Directory | None = Field(
        default=None,
        description="draw simulation.svg into DIR",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fleet with its faults, its traffic, what to compare and the machine."""
    parser.description = (
        "Simulate many independent expert-parallel groups: plan layers of their batches with the "
        "planner that serves, predict times, and show distributions. No server and no GPU is "
        "needed. The same --seed gives the same report, but for the times of plans."
    )
    for schema in (Fleet, TrafficFlags, SimulateFlags):
        schema.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, write the files, print. Raises UltraEPError with what to do."""
    fleet, flags = Fleet.from_flags(arguments), SimulateFlags.from_flags(arguments)
    asked = TrafficFlags.from_flags(arguments)
    prepare_outputs(flags.json_file)
    document, simulations = simulate_fleet(fleet, asked, flags)
    show(document, _view(document), flags.json_file)
    if flags.plots is not None:  # last: without matplotlib the report is there at least
        from ultraep_lab.plots import draw_simulations

        write_pictures(flags.plots, draw_simulations(simulations))
    return 0


def simulate_fleet(
    fleet: Fleet, asked: TrafficFlags, flags: SimulateFlags
) -> tuple[dict[str, Any], list[Simulation]]:
    """The report as JSON, and what each variant made of all groups; errors as of ``run``."""
    shape = model_shape(flags.model)
    shape = replace(shape, num_experts=asked.experts) if asked.experts else shape
    variants = [_variants(flags, shape, num_ranks) for num_ranks in flags.ep]
    pictures = [pieces_of(prefill_trace(path, shape)) for path in asked.trace]
    traffics = [_traffic(asked, shape, num_ranks, pictures, fleet.seed) for num_ranks in flags.ep]
    simulations: list[Simulation] = []
    for traffic, of_one_size in zip(traffics, variants, strict=True):
        simulations += _simulated(fleet, traffic, of_one_size, flags.processes)
    document = simulation_document(fleet, _described(asked, traffics[0]), simulations)
    document["hardware"] = flags.hardware
    return document, simulations


def _variants(flags: SimulateFlags, shape: ModelShape, num_ranks: int) -> list[Variant]:
    """Everything that is compared with ``num_ranks`` per group."""
    made = [
        Variant(machine_setting(flags, shape, num_ranks, domain), slots, relay)
        for domain in flags.domain_size or (None,)
        for slots in flags.slots
        for relay in flags.relay
    ]
    return list({variant.name: variant for variant in made}.values())


def _traffic(
    asked: TrafficFlags, shape: ModelShape, num_ranks: int, pictures: Sequence[Any], seed: int
) -> SimulatedTraffic:
    assignments = asked.rank_tokens * num_ranks * shape.experts_per_token
    if pictures:
        return Captured.drawn(pictures, assignments, asked.period)
    workload = Workload(
        kind=asked.kind or KIND,
        num_tokens=1,
        num_layers=1,
        num_experts=shape.num_experts,
        top_k=shape.experts_per_token,
        num_ranks=num_ranks,
        imbalance=1.0,
        period=asked.period,
        seed=seed,
    )
    layers = asked.layers or shape.num_moe_layers
    return Synthetic.made(workload, asked.imbalance, layers, assignments)


def _simulated(
    fleet: Fleet, traffic: SimulatedTraffic, variants: Sequence[Variant], processes: int
) -> Iterator[Simulation]:
    num_ranks = variants[0].setting.num_ranks
    groups = num_groups(fleet, num_ranks)
    console = Console(stderr=True)
    parts = list(
        track(
            simulate(fleet, traffic, variants, processes),
            description=f"EP{num_ranks}, {groups} groups",
            total=groups,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
    )
    layers = groups * fleet.batches * traffic.num_layers
    for variant, found in zip(variants, zip(*parts, strict=True), strict=True):
        yield Simulation(variant, traffic, groups, layers, np.concatenate(found))


def _described(asked: TrafficFlags, traffic: SimulatedTraffic) -> dict[str, Any]:
    sizes = {"layers": traffic.num_layers, "rank_tokens": asked.rank_tokens}
    sizes["period"] = asked.period
    if asked.trace:
        return {"traces": [path.name for path in asked.trace], **sizes}
    return {"kind": asked.kind or KIND, **sizes}


def _view(document: dict[str, Any]) -> RenderableType:
    """Distributions of the first variant, then all variants, for a terminal of 80 characters."""
    first, traffic = document["variants"][0], document["traffic"]
    source = ", ".join(traffic["traces"]) if "traces" in traffic else f"made up ({traffic['kind']})"
    head = Text(f"{document['model']} ({document['weights']}) on {document['hardware']}, ")
    head.append(f"{first['ranks']} ranks, {first['groups']} groups; {first['name']}\n")
    batches = counted(document["fleet"]["batches"], "batch", "batches")
    layers = counted(traffic["layers"], "layer", "layers")
    head.append(f"traffic: {source}, {batches} of {layers}, ")
    head.append(f"{traffic['rank_tokens']} tokens per rank\n")
    head.append(f"planned {first['planned_layers']} of {first['layers']} layers, ")
    head.append(f"seed {document['fleet']['seed']}; {first['followed']:.0%} of these plans pay\n")
    parts = [head, _distributions(document)]
    if len(document["variants"]) > 1:
        parts.append(_comparison(document))
    plans = document["plan_seconds"]["machine"]
    parts.append(Text(f"Plans were timed here: {plans['cpu']}, {plans['cores']} cores. Times of "
                      "layers are predicted."))  # fmt: skip
    return Group(*parts)


def _distributions(document: dict[str, Any]) -> RenderableType:
    over = "distribution over layers"
    table = figures_table((over, "1 %", "50 %", "99 %", "worst"), texts=(over,), padding=0)
    first = document["variants"][0]

    def add(name: str, values: dict[str, float], scale: float = 1, digits: int = 3) -> None:
        table.add_row(name, *(f"{values[key] * scale:.{digits}f}" for key in PERCENTILES))

    for kind, words in (("imbalance", "imbalance"), ("time_imbalance", "imbalance of time")):
        for when, values in first.get(kind, {}).items():
            add(f"{words}, {WHEN[when]}", values)
    if "returned" in first:
        add("assignments sent home, %", first["returned"], 100, 2)
    add("copies", first["copies"], digits=0)
    add("busiest link, MiB", first["busiest_link_bytes"], 1 / MIB, 0)
    add("layer without balancing, ms", first["layer_seconds"]["off"], 1e3, 2)
    add("layer, balanced, ms", first["layer_seconds"]["balanced"], 1e3, 2)
    add("plan, us", document["plan_seconds"]["variants"][0], 1e6, 0)
    return table


def _comparison(document: dict[str, Any]) -> RenderableType:
    kind = "time_imbalance" if document["fleet"]["slow_ranks"] else "imbalance"
    heads = (
        "EP", "domain", "slots", "relays", "before\n50 %", "floor\n50 %", "after\n50 %",
        "\n99 %", "\nworst", "link\nMiB\n99 %", "plan\nus\n50 %", "gain",
    )  # fmt: skip
    title = "imbalance of time" if kind == "time_imbalance" else "imbalance"
    table = figures_table(heads, texts=("EP",), title=title, padding=0)
    for row, plan in zip(document["variants"], document["plan_seconds"]["variants"], strict=True):
        found = row[kind]
        table.add_row(
            *(str(row[key]) for key in ("ep", "domain", "slots", "relay")),
            f"{found['before']['p50']:.2f}",
            f"{found['floor']['p50']:.3f}",
            *(f"{found['after'][key]:.3f}" for key in ("p50", "p99", "worst")),
            f"{row['busiest_link_bytes']['p99'] / MIB:.0f}",
            f"{plan['p50'] * 1e6:.0f}",
            f"{row['predicted_gain']:.2f}x",
        )
    return table
