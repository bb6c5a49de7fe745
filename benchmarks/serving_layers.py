"""Where the time of a layer goes, and how far predictions are from it, in served batches."""

import argparse
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from served import model, new_records, serve

from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.text import sample_text
from ultraep_serve.costs.calibration import fit
from ultraep_serve.costs.model import CostModel
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.run_directory import run_directory_of_port
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy, Stage


def layers(options: argparse.Namespace) -> dict[str, Any]:
    """Predicted against measured time of a layer, in served batches of many sizes.

    Predicted twice: by the costs that the server measured when it started, and by a line (seconds
    over assignments of the busiest rank) fitted to every other batch. Both are compared with the
    batches between; a batch's figures are the means over its layers.
    """
    chooser = random.Random(0)
    lengths = [chooser.randint(512, 8192) for _ in range(options.prompts)]
    with (
        serve(options, model(options.model), "bfloat16", "--allow-ideal") as running,
        closing(Server(running.url)) as server,
        closing(Sidecar(running.sidecar_url, running.token)) as sidecar,
    ):
        server.first_token(sample_text("law", 2048, 1))
        for number, length in enumerate(lengths):
            sidecar.set_policy((Policy.QUOTA, Policy.IDEAL)[number % 4 == 3])
            server.first_token(sample_text("law", length, 100 + number))
        samples = layer_samples(run_directory_of_port(running.port))
        costs = measured_costs(running.log_path)
    fitted = fit(samples[::2])
    predictions: dict[str, Callable[[float], float]] = {
        "fitted_to_every_other_batch": fitted.predict,
        "measured_at_start": lambda work: costs.base_seconds + costs.seconds_per_assignment * work,
    }
    document = {
        "model": options.model,
        "mode": options.mode,
        "costs_measured_at_start": asdict(costs),
        "fitted": {"seconds_per_assignment": fitted.slope, "base_seconds": fitted.intercept},
        "held_out_batches": len(samples[1::2]),
        "relative_error": {
            name: errors(predict, samples[1::2]) for name, predict in predictions.items()
        },
        "samples": samples,
    }
    print({name: value for name, value in document.items() if name != "samples"})
    return document


def profile(options: argparse.Namespace) -> dict[str, Any]:
    """Where a layer's time goes: medians of microseconds by prompt length, policy and rank.

    Stages as the ranks record them. ``experts`` is the part of ``compute`` that a rank spends on
    its own experts; the rest is waiting for the others and the sum over ranks.
    """
    chosen = (Policy.QUOTA, Policy.IDEAL)  # switched off, layers are not recorded
    found: dict[tuple[int, Policy], list[list[Any]]] = {}
    with (
        serve(options, model(options.model), "bfloat16", "--allow-ideal") as running,
        closing(Server(running.url)) as server,
        closing(Sidecar(running.sidecar_url, running.token)) as sidecar,
    ):
        run_path = run_directory_of_port(running.port)
        readers = [RingReader(RunFiles(run_path).ring(rank)) for rank in range(2)]
        for number in range(-1, options.repeats):
            for length in options.prompt_tokens:
                for policy in chosen if number % 2 else reversed(chosen):
                    sidecar.set_policy(policy)
                    server.first_token(sample_text("law", length, 100 + number))
                    records = new_records(readers)
                    if number >= 0:  # the first round warms up
                        found.setdefault((length, policy), []).append(records)
    rows = [
        {
            "prompt_tokens": length,
            "policy": policy.value,
            "ranks": [microseconds(np.concatenate(mine)) for mine in zip(*records, strict=True)],
        }
        for (length, policy), records in sorted(found.items())
    ]
    for row in rows:
        print(row)
    return {"model": options.model, "mode": options.mode, "unit": "microseconds", "rows": rows}


def microseconds(records: RecordArray) -> dict[str, float]:
    """Medians over layers of the stages, and of the rank's own experts."""
    medians = np.median(records["stage_ns"], axis=0) / 1000
    stages = {stage.name.lower(): float(medians[stage]) for stage in Stage}
    return {
        **stages,
        "experts": float(np.median(records["experts_ns"])) / 1000,
        "replicas": float(np.median(records["replicas"])),
        "layers": len(records),
    }


def errors(
    predict: Callable[[float], float], samples: list[tuple[float, float]]
) -> dict[str, float]:
    """How far predictions are off, relative to what was measured."""
    signed = np.array([predict(work) / seconds - 1 for work, seconds in samples])
    off = np.abs(signed)
    return {
        "median": float(np.median(off)),
        "p90": float(np.quantile(off, 0.9)),
        "max": float(off.max()),
        "median_signed": float(np.median(signed)),
    }


def measured_costs(log_path: Path) -> CostModel:
    """The cost model that a server logs when it starts."""
    _, found, rest = log_path.read_text(errors="replace").partition("ultraep: costs ")
    if not found:
        raise SystemExit(f"{log_path} has no costs")
    return CostModel.from_json(rest.splitlines()[0])


def layer_samples(run_path: Path) -> list[tuple[float, float]]:
    """(assignments of the busiest rank, seconds of the engine's part) of a layer, batch by batch.

    A layer takes as long as its slowest rank; both are means over a batch's layers.
    """
    records = new_records([RingReader(RunFiles(run_path).ring(rank)) for rank in range(2)])
    seconds = {}
    for rank_records in records:
        for record in rank_records:
            key = (int(record["batch"]), int(record["layer"]))
            took = float(record["stage_ns"][Stage.COMPUTE]) / 1e9
            seconds[key] = max(took, seconds.get(key, 0.0))
    batches: dict[int, list[tuple[float, float]]] = {}
    for record in records[0]:
        batch, layer = int(record["batch"]), int(record["layer"])
        work = float(record["load_after"].max())
        batches.setdefault(batch, []).append((work, seconds[batch, layer]))
    means = [np.mean(layers, axis=0).tolist() for layers in batches.values()]
    return [(work, took) for work, took in means]
