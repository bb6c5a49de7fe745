"""`ultraep-serve simulate`: thousands of ranks, planned on this machine."""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import track
from rich.table import Table
from rich.text import Text

from ultraep_serve.cli.arguments import (
    add_json_argument,
    built,
    names,
    number,
    numbers,
    prepare_outputs,
    show,
    write_pictures,
)
from ultraep_serve.costs.shapes import ModelShape, model_shape
from ultraep_serve.errors import ConfigError
from ultraep_serve.lab.advise.advice import prefill_trace
from ultraep_serve.lab.commands.machine import (
    add_machine_arguments,
    check_machine_arguments,
    machine_setting,
)
from ultraep_serve.lab.simulate.layer import Variant
from ultraep_serve.lab.simulate.output import PERCENTILES, simulation_document
from ultraep_serve.lab.simulate.simulation import Fleet, Simulation, num_groups, simulate
from ultraep_serve.lab.simulate.traffic import Recorded, Synthetic, Traffic, pieces_of
from ultraep_serve.lab.workloads import KINDS, Workload

__all__ = ["add_arguments", "run"]

MIB = 1 << 20
MOST_RANKS, MOST_EP, MOST_EXPERTS = 1 << 20, 1 << 10, 1 << 13
MOST_BATCHES, MOST_LAYERS, MOST_PLANS, MOST_PROCESSES = 100_000, 10_000, 20_000_000, 256
RELAYS = ("auto", "always", "never")  # as a server's --relay
KIND = "switch"  # of made-up traffic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fleet, its traffic, its faults, what to compare and the machine."""
    parser.description = (
        "Simulate many independent expert-parallel groups: plan layers of their batches with the "
        "planner that serves, predict times, and show distributions. No server and no GPU is "
        "needed. The same --seed gives the same report, but for the times of plans."
    )
    for flag, kind, default, text in (
        ("--ranks", number(1, MOST_RANKS), 2560, "ranks of all groups"),
        ("--batches", number(1, MOST_BATCHES), 100, "batches of each group"),
        ("--rank-tokens", number(1), 8192, "tokens per rank and batch; of traces, about"),
        ("--period", number(1, MOST_BATCHES), 50, "batches between changes of the traffic"),
        ("--plans", number(1, MOST_PLANS), 250_000,
         "layers that each variant plans at most, drawn from all batches"),
        ("--seed", number(0), 0, "seed of everything that is drawn"),
        ("--processes", number(1, MOST_PROCESSES), os.cpu_count() or 1,
         "processes that work (default: cores)"),
    ):  # fmt: skip
        parser.add_argument(flag, type=kind, metavar="N", default=default, help=text)
    _add_traffic_arguments(parser)
    _add_variant_arguments(parser)
    for flag, value, text in (
        ("--slow-ranks", 0.0, "chance that a rank is slow"),
        ("--slowest", 0.5, "lowest speed of slow ranks, where others have 1"),
        ("--slow-links", 0.0, "chance that a rank's link is slow"),
        ("--slowest-link", 0.5, "lowest speed of slow links, where others have 1"),
        ("--dead-links", 0.0, "chance that two ranks cannot send each other weights"),
    ):
        parser.add_argument(flag, type=float, metavar="X", default=value, help=text)
    add_machine_arguments(parser, hardware="gb200", model="deepseek-v3")
    add_json_argument(parser)
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw simulation.svg into DIR")


def _add_traffic_arguments(parser: argparse.ArgumentParser) -> None:
    traces = (
        "recorded traces, .npz, or .parquet of loads: batches are drawn from their sequences or "
        "batches, and they take turns"
    )
    parser.add_argument("--trace", type=Path, nargs="+", metavar="FILE", help=traces)
    kinds = f"kind of made-up traffic, as in make-trace (default: {KIND})"
    parser.add_argument("--kind", choices=KINDS, help=kinds)
    imbalance = (
        "expected imbalances of made-up layers, each as frequent (default: 1.3 to 4, as far as "
        "ranks and experts can have them)"
    )
    parser.add_argument("--imbalance", type=_decimals, metavar="X,...", help=imbalance)
    layers = "MoE layers of made-up traffic (default: the model's)"
    parser.add_argument("--layers", type=number(1, MOST_LAYERS), metavar="N", help=layers)
    experts = "experts per layer of made-up traffic (default: the model's)"
    parser.add_argument("--experts", type=number(1, MOST_EXPERTS), metavar="N", help=experts)


def _add_variant_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, kind, default, text in (
        ("--ep", numbers(1, MOST_EP), "64", "ranks per group"),
        ("--slots", numbers(0, 64), "2", "replica slots per rank"),
        ("--domain-size", numbers(1), None, "ranks per domain (default: GPUs that NVLink joins)"),
    ):
        text += "; several are compared"
        parser.add_argument(flag, type=kind, metavar="N,...", default=default, help=text)
    relay = f"whether ranks forward experts: {', '.join(RELAYS)}; several are compared"
    parser.add_argument("--relay", type=names, metavar="WHEN,...", default="auto", help=relay)


def _decimals(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(word) for word in names(text) or [text]))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers like 1.5,2") from None


def run(arguments: argparse.Namespace) -> int:
    """Simulate, write the files, print. Raises UltraEPError with what to do."""
    check_machine_arguments(arguments)
    fleet = built(Fleet, arguments)
    shape = _shape(arguments)
    variants = [_variants(arguments, shape, num_ranks) for num_ranks in arguments.ep]
    pictures = [pieces_of(prefill_trace(path, shape)) for path in arguments.trace or ()]
    traffics = [_traffic(arguments, shape, num_ranks, pictures) for num_ranks in arguments.ep]
    prepare_outputs(arguments.json)
    simulations: list[Simulation] = []
    for traffic, of_one_size in zip(traffics, variants, strict=True):
        simulations += _simulated(fleet, traffic, of_one_size, arguments.processes)
    document = simulation_document(fleet, _described(arguments, traffics[0]), simulations)
    document["hardware"] = arguments.hardware
    show(document, _view(document), arguments.json)
    if arguments.plots is not None:  # last: without matplotlib the report is there at least
        from ultraep_serve.lab.plots import draw_simulations

        write_pictures(arguments.plots, draw_simulations(simulations))
    return 0


def _shape(arguments: argparse.Namespace) -> ModelShape:
    """The model, with as many experts as were asked for."""
    for name in ("kind", "imbalance", "layers", "experts"):
        if arguments.trace and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for made-up traffic; leave it out with --trace")
    shape = model_shape(arguments.model_config)
    return replace(shape, num_experts=arguments.experts) if arguments.experts else shape


def _variants(arguments: argparse.Namespace, shape: ModelShape, num_ranks: int) -> list[Variant]:
    """Everything that is compared with ``num_ranks`` per group."""
    if not arguments.relay or not set(arguments.relay) <= set(RELAYS):
        given = ",".join(arguments.relay)
        raise ConfigError(f"--relay = {given!r} must be one or more of {', '.join(RELAYS)}")
    domains = [None] if arguments.domain_size is None else arguments.domain_size
    made = [
        Variant(machine_setting(arguments, shape, num_ranks, domain), slots, relay)
        for domain in domains
        for slots in arguments.slots
        for relay in dict.fromkeys(arguments.relay)
    ]
    return list({variant.name: variant for variant in made}.values())


def _traffic(
    arguments: argparse.Namespace, shape: ModelShape, num_ranks: int, pictures: Sequence[Any]
) -> Traffic:
    assignments = arguments.rank_tokens * num_ranks * shape.experts_per_token
    if pictures:
        return Recorded.drawn(pictures, assignments, arguments.period)
    workload = Workload(
        arguments.kind or KIND,
        num_tokens=1,
        num_layers=1,
        num_experts=shape.num_experts,
        top_k=shape.experts_per_token,
        num_ranks=num_ranks,
        imbalance=1.0,
        period=arguments.period,
        seed=arguments.seed,
    )
    layers = arguments.layers or shape.num_moe_layers
    return Synthetic.made(workload, arguments.imbalance, layers, assignments)


def _simulated(
    fleet: Fleet, traffic: Traffic, variants: Sequence[Variant], processes: int
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


def _described(arguments: argparse.Namespace, traffic: Traffic) -> dict[str, Any]:
    sizes = {"layers": traffic.num_layers, "rank_tokens": arguments.rank_tokens}
    sizes["period"] = arguments.period
    if arguments.trace:
        return {"traces": [path.name for path in arguments.trace], **sizes}
    return {"kind": arguments.kind or KIND, **sizes}


def _view(document: dict[str, Any]) -> RenderableType:
    """Distributions of the first variant, then all variants, for a terminal of 80 characters."""
    first, traffic = document["variants"][0], document["traffic"]
    source = ", ".join(traffic["traces"]) if "traces" in traffic else f"made up ({traffic['kind']})"
    head = Text(f"{document['model']} ({document['weights']}) on {document['hardware']}, ")
    head.append(f"{first['ranks']} ranks, {first['groups']} groups; {first['name']}\n")
    head.append(f"traffic: {source}, {document['fleet']['batches']} batches of ")
    head.append(f"{traffic['layers']} layers, {traffic['rank_tokens']} tokens per rank\n")
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
    table = _table("distribution over layers", "1 %", "50 %", "99 %", "worst")
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


WHEN = {"before": "before", "floor": "floor", "after": "after", "planned": "without dead links"}


def _comparison(document: dict[str, Any]) -> RenderableType:
    kind = "time_imbalance" if document["fleet"]["slow_ranks"] else "imbalance"
    table = _table(
        "EP", "domain", "slots", "relays", "before\n50 %", "floor\n50 %", "after\n50 %",
        "\n99 %", "\nworst", "link\nMiB\n99 %", "plan\nus\n50 %", "gain",
    )  # fmt: skip
    table.title = "imbalance of time" if kind == "time_imbalance" else "imbalance"
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


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
