"""Does the cost model predict UltraEP's published prefill gains from its published imbalances?

    python benchmarks/paper_projection.py --json benchmarks/results/paper-projection.json

Reported: arXiv 2606.04101, requests per second at an average-TTFT objective, read off a figure
(about 3 %). The model is given the imbalances, the number of ranks and the model's shape; nothing
is fitted to the reported gains in the first table. To distinguish a wrong setting from a wrong
model follow the same prediction from measured rates of single operators instead of data sheets
(operator_rates.py), once more as if the busiest rank did not delay dispatch and combine, the
closest setting of a grid for each kind of traffic, and the share of the time that experts would
have to take for each reported gain, which should be the same within a row.

Also the memory that one replica slot instead of two saves.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import harness
import numpy as np

from ultraep_lab.advise.predict import Prefill, prefill_seconds
from ultraep_serve.costs.hardware import Efficiency, estimate_costs, hardware
from ultraep_serve.costs.model import CostModel, Transfer
from ultraep_serve.costs.operator_rates import MeasuredRates
from ultraep_serve.costs.shapes import ModelShape, model_shape

MIB = 1 << 20
LINK_EXPERTS = Transfer(2, 2)  # two slots per rank, so two experts on the busiest link with relays


@dataclass(frozen=True)
class Reported:
    """One row of the published table: imbalances, and requests per second."""

    name: str
    model: str
    num_ranks: int
    imbalance: tuple[float, float, float]  # none, EPLB, UltraEP
    rate: tuple[float, float, float, float]  # none, EPLB, UltraEP, ideal


PUBLISHED = (
    Reported("Qwen3-235B STEM", "qwen3-235b-a22b", 64, (3.68, 2.59, 1.04), (175, 278, 361, 374)),
    Reported("GLM4.7-358B STEM", "glm-4.7", 40, (3.09, 2.05, 1.01), (304, 358, 548, 627)),
    Reported("Qwen3-235B mixed", "qwen3-235b-a22b", 64, (4.01, 2.56, 1.03), (125, 133, 151, 158)),
    Reported("GLM4.7-358B mixed", "glm-4.7", 40, (2.06, 1.80, 1.01), (82, 82, 95, 103)),
)
RATES = Path(__file__).resolve().parent / "results" / "operator_rates"  # ENGINE-MODEL.json
ENGINES = ("sglang", "vllm", "trtllm")  # whose kernels were measured
GAINS = ("EPLB / none", "UltraEP / none", "UltraEP / ideal")


@dataclass(frozen=True)
class Assumed:
    """What the published table does not say."""

    tokens_per_rank: int = 8192  # per batch; the published kernel table has as many
    context_tokens: int = 4096  # per prompt
    weight_type: str = "bf16"  # of the published kernel table
    matrix_efficiency: float = 0.5
    hardware: str = "gb200"  # 706 GB/s on a link of a 64-GPU domain: no Hopper has that


@dataclass(frozen=True)
class Projection:
    """Predicted against reported for one row; ratios in the order of GAINS."""

    name: str
    predicted: tuple[float, ...]
    reported: tuple[float, ...]
    error: tuple[float, ...]  # predicted / reported - 1
    stretched_share: float  # of a balanced prefill: what imbalance stretches, as predicted


def main() -> None:
    """Print the tables; write them with the command to --json."""
    options = harness.parser(__doc__).parse_args()
    assumed = Assumed()
    projections = [project(row, assumed) for row in PUBLISHED]
    print(f"Predicted / reported, assuming {describe(assumed)}")
    print_projections(projections)
    measured = {engine: project_measured(engine, assumed) for engine in ENGINES}
    unstretched = project_measured(ENGINES[0], assumed, is_dispatch_stretched=False)
    for engine, rows in measured.items():
        print(f"\nThe same with measured rates of operators, {engine}'s kernels")
        print_projections(rows)
    print(f"\nOf these, {ENGINES[0]}'s, if imbalance stretched no dispatch and combine")
    print_projections(unstretched)
    closest = {traffic: closest_setting(traffic) for traffic in ("STEM", "mixed")}
    for setting, fitted in closest.values():
        print(f"\nClosest of a grid, fitted to these rows: {describe(setting)}")
        print_projections(fitted)
    shares = {row.name: implied_shares(row) for row in PUBLISHED}
    print("\nShare of a balanced prefill that experts would have to take, by each reported gain")
    for name, values in shares.items():
        print(f"  {name:18} " + "  ".join(f"{gain}: {x:.2f}" for gain, x in values.items()))
    memory = memory_table()
    print("\nReplica memory per rank (EP64 or any other), MiB")
    for line in memory:
        print("  {model:16} {weights:5} one slot {one:7.1f}, two {two:7.1f}: one saves {saves:7.1f}"
              " shared, {saves_per_layer:8.0f} per layer".format(**line))  # fmt: skip
    results = {
        "reported_by": "arXiv 2606.04101, read off a figure (about 3 %)",
        "gains": GAINS,
        "assumed": asdict(assumed),
        "rows": [asdict(projection) for projection in projections],
        "mean_error": mean_errors(projections),
        "measured_rates": {engine: with_error(rows) for engine, rows in measured.items()},
        "measured_rates_dispatch_not_stretched": {ENGINES[0]: with_error(unstretched)},
        "closest": {
            traffic: {"assumed": asdict(setting), "rows": [asdict(row) for row in fitted]}
            for traffic, (setting, fitted) in closest.items()
        },
        "implied_expert_share": shares,
        "memory_mib": memory,
    }
    harness.write(options.json, results)


def describe(assumed: Assumed) -> str:
    """One line."""
    return (
        f"{assumed.hardware}, {assumed.weight_type}, {assumed.tokens_per_rank} tokens per rank and "
        f"batch, prompts of {assumed.context_tokens}, {assumed.matrix_efficiency:.0%} of the peak"
    )


def project_measured(
    engine: str, assumed: Assumed, *, is_dispatch_stretched: bool = True
) -> list[Projection]:
    """All rows, by the committed rates. Raises ConfigError where these are not of this setting."""
    projections = []
    for row in PUBLISHED:
        rates = MeasuredRates.from_file(RATES / f"{engine}-{row.model}.json")
        setting = assumed.hardware, assumed.weight_type, assumed.context_tokens
        rates.check(model_shape(row.model), *setting)
        projections.append(project(row, assumed, rates, is_dispatch_stretched))
    return projections


def project(
    row: Reported,
    assumed: Assumed,
    measured: MeasuredRates | None = None,
    is_dispatch_stretched: bool = True,
) -> Projection:
    """Throughput ratios of ``row`` from its imbalances."""
    shape = model_shape(row.model)
    estimate = estimate_costs(
        shape,
        hardware(assumed.hardware),
        num_ranks=row.num_ranks,
        weight_type=assumed.weight_type,
        context_tokens=assumed.context_tokens,
        efficiency=Efficiency(assumed.matrix_efficiency, assumed.matrix_efficiency),
        measured=measured,
    )
    if measured and not is_dispatch_stretched:
        estimate = replace(estimate, costs=with_even_dispatch(estimate.costs, shape, measured))
    tokens = assumed.tokens_per_rank * row.num_ranks
    off, eplb, ultraep = row.imbalance
    batches = {
        "none": Prefill(tokens, row.num_ranks, off),
        "eplb": Prefill(tokens, row.num_ranks, eplb, slots=2),
        "ultraep": Prefill(
            tokens, row.num_ranks, ultraep, slots=2, transfer=LINK_EXPERTS, exchanged=True
        ),
        "ideal": Prefill(tokens, row.num_ranks, 1.0),
    }
    seconds = {name: prefill_seconds(shape, estimate, batch) for name, batch in batches.items()}
    predicted = (
        seconds["none"] / seconds["eplb"],
        seconds["none"] / seconds["ultraep"],
        seconds["ideal"] / seconds["ultraep"],
    )
    none, by_eplb, by_ultraep, ideal = row.rate
    reported = (by_eplb / none, by_ultraep / none, by_ultraep / ideal)
    error = tuple(p / r - 1 for p, r in zip(predicted, reported, strict=True))
    share = (seconds["none"] / seconds["ideal"] - 1) / (off - 1)
    return Projection(row.name, predicted, reported, error, share)


def with_even_dispatch(costs: CostModel, shape: ModelShape, measured: MeasuredRates) -> CostModel:
    """``costs`` where dispatch and combine take as long on every rank as balanced ones do."""
    computed = shape.expert_flops / measured.rates["expert_flops"]
    sent = shape.experts_per_token * (costs.seconds_per_assignment - computed)
    other = costs.other_seconds_per_token + sent
    return replace(costs, seconds_per_assignment=computed, other_seconds_per_token=other)


def closest_setting(traffic: str) -> tuple[Assumed, list[Projection]]:
    """The setting of a grid, one for both models, with the smallest worst error on ``traffic``."""
    rows = [row for row in PUBLISHED if row.name.endswith(traffic)]
    best: tuple[float, Assumed, list[Projection]] | None = None
    for tokens, context, weights, efficiency in itertools.product(
        (1024, 2048, 4096, 8192, 16384, 32768),
        (2048, 8192, 32768, 131072),
        ("bf16", "fp8"),
        (0.3, 0.5, 0.7),
    ):
        assumed = Assumed(tokens, context, weights, efficiency)
        projections = [project(row, assumed) for row in rows]
        worst = max(abs(error) for projection in projections for error in projection.error)
        if best is None or worst < best[0]:
            best = worst, assumed, projections
    assert best is not None
    return best[1], best[2]


def implied_shares(row: Reported) -> dict[str, float]:
    """The share x of a balanced prefill that imbalance stretches, from each reported ratio.

    Time is 1 - x + x * imbalance, so a rate ratio g between imbalances a and b gives
    x = (g - 1) / (a - 1 - g * (b - 1)). Above 1 or below 0 no share explains the ratio.
    """
    off, eplb, ultraep = row.imbalance
    none, by_eplb, by_ultraep, ideal = row.rate
    pairs = {
        "none to EPLB": (by_eplb / none, off, eplb),
        "none to UltraEP": (by_ultraep / none, off, ultraep),
        "EPLB to UltraEP": (by_ultraep / by_eplb, eplb, ultraep),
        "none to ideal": (ideal / none, off, 1.0),
    }
    return {
        name: (gain - 1) / (high - 1 - gain * (low - 1))
        for name, (gain, high, low) in pairs.items()
    }


def memory_table() -> list[dict[str, str | float]]:
    """MiB per rank of one and of two slots, as shared pool and as redundant experts per layer."""
    lines: list[dict[str, str | float]] = []
    for model, weights in itertools.product(("qwen3-235b-a22b", "deepseek-v3"), ("bf16", "fp8")):
        shape = model_shape(model)
        expert, layers = shape.expert_bytes(weights), shape.num_moe_layers
        lines.append(
            {
                "model": model,
                "weights": weights,
                "one": expert / MIB,
                "two": 2 * expert / MIB,
                "saves": expert / MIB,
                "one_per_layer": layers * expert / MIB,
                "two_per_layer": 2 * layers * expert / MIB,
                "saves_per_layer": layers * expert / MIB,
                # KV cache that the memory of all layers but one would hold
                "kv_tokens_of_one_per_layer": (layers - 1) * expert // shape.kv_bytes_per_token,
            }
        )
    return lines


def with_error(rows: Sequence[Projection]) -> dict[str, object]:
    """Rows and their mean error, for the JSON."""
    return {"rows": [asdict(row) for row in rows], "mean_error": mean_errors(rows)}


def mean_errors(projections: Sequence[Projection]) -> list[float]:
    """Mean absolute error over rows, in the order of GAINS."""
    errors: list[float] = np.abs([row.error for row in projections]).mean(0).tolist()
    return errors


def print_projections(projections: list[Projection]) -> None:
    """One line per row, and the mean absolute error."""
    print(f"  {'':18} " + "  ".join(f"{gain:>28}" for gain in GAINS))
    for row in projections:
        cells = (
            f"{predicted:6.2f} / {reported:5.2f} ({error:+6.1%})"
            for predicted, reported, error in zip(
                row.predicted, row.reported, row.error, strict=True
            )
        )
        print(
            f"  {row.name:18} "
            + "  ".join(f"{cell:>28}" for cell in cells)
            + f"  stretched share {row.stretched_share:.2f}"
        )
    errors = mean_errors(projections)
    print(f"  {'mean |error|':18} " + "  ".join(f"{error:28.1%}" for error in errors))


if __name__ == "__main__":
    main()
