"""Advice in pictures, as PNG; needs matplotlib, draws without a display."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ultraep_serve.costs.advice import NEEDS_NO_SLOTS, Advice, Outcome
from ultraep_serve.errors import UnsupportedError

__all__ = ["draw"]

COLOURS = {
    "off": "#555555",
    "quota": "#0072b2",
    "eplb": "#d55e00",
    "eplb-slots": "#e69f00",
    "lplb": "#009e73",
    "llep": "#cc79a7",
    "exact": "#56b4e9",
    "ideal": "#999999",
}  # Okabe and Ito's, told apart by colour-blind readers too
STYLES = ("-", "--", "-.", ":")
CURVE_POINTS = 120


def draw(advice: Advice, slots: int) -> Mapping[str, bytes]:
    """Three PNGs by file name; pictures over time are of ``slots`` per rank.

    Raises UnsupportedError where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "pictures need matplotlib; run `pip install ultraep-serve[analysis]`"
        ) from error

    def picture(paint: Callable[[Any], None]) -> bytes:
        figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        stream = io.BytesIO()
        FigureCanvasAgg(figure).print_png(stream)
        return stream.getvalue()

    return {
        "imbalance.png": picture(lambda axes: _imbalance(axes, advice, slots)),
        "gain-by-slots.png": picture(lambda axes: _gain(axes, advice)),
        "break-even.png": picture(lambda axes: _break_even(axes, advice)),
    }


def _title(advice: Advice) -> str:
    setting = advice.setting
    return f"{setting.shape.name}, EP{setting.num_ranks}, {setting.weight_type}"


def _imbalance(axes: Any, advice: Advice, slots: int) -> None:
    shown = [advice.off]
    shown += [o for o in advice.outcomes if o.policy in NEEDS_NO_SLOTS or o.slots == slots]
    for outcome in shown:
        batches = np.arange(len(outcome.imbalance)) + advice.skipped_first
        axes.plot(
            batches, outcome.imbalance, marker="o", markersize=4,
            color=COLOURS.get(outcome.policy), label=outcome.policy,
        )  # fmt: skip
    if advice.floor > 1.01:
        axes.axhline(advice.floor, color="#999999", linestyle=":", label="floor of the domains")
    axes.set_ylim(bottom=1.0 - 0.04 * (max(advice.off.imbalance) - 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(f"batch of {advice.batch_tokens:.0f} tokens")
    axes.set_ylabel("busiest rank / mean, mean over layers")
    axes.set_title(f"Imbalance as served, {slots} replica slots per rank: {_title(advice)}")
    axes.legend(frameon=False)


def _gain(axes: Any, advice: Advice) -> None:
    by_policy: dict[str, list[Outcome]] = {}
    for outcome in advice.outcomes:
        by_policy.setdefault(outcome.policy, []).append(outcome)
    for policy, outcomes in by_policy.items():
        gains = [advice.gain(outcome) for outcome in outcomes]
        colour = COLOURS.get(policy)
        if policy in NEEDS_NO_SLOTS:
            needed = outcomes[0].slots_needed
            label = f"{policy} (takes {needed} slots)" if needed else policy
            axes.axhline(gains[0], color=colour, linestyle="--", label=label)
            continue
        slots = [outcome.slots for outcome in outcomes]
        axes.plot(slots, gains, marker="o", color=colour, label=policy)
        for number, gain in zip(slots, gains, strict=True):
            axes.annotate(
                f"{gain:.2f}", (number, gain), (0, 6), textcoords="offset points",
                ha="center", fontsize=8, color=colour,
            )  # fmt: skip
    axes.axhline(1.0, color=COLOURS["off"], linewidth=1, label="off")
    axes.margins(y=0.12)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("replica slots per rank")
    axes.set_ylabel("predicted prefill throughput / off")
    axes.set_title(f"Gain in batches of {advice.batch_tokens:.0f} tokens: {_title(advice)}")
    axes.legend(frameon=False)


def _break_even(axes: Any, advice: Advice) -> None:
    served = [o for o in advice.outcomes if o.policy == "quota" and o.transfer.busiest_link]
    limits = [tokens for outcome in served if (tokens := advice.break_even(outcome)) is not None]
    marks = [advice.batch_tokens, *limits]
    sizes = np.geomspace(min(marks) / 16, max(marks) * 64, CURVE_POINTS)
    for outcome, style in zip(served, STYLES * len(served), strict=False):
        gains = [advice.gain_at(outcome, number) for number in sizes]
        break_even = advice.break_even(outcome)
        label = f"{outcome.slots} slots: "
        label += "never" if break_even is None else f"from {break_even} tokens"
        axes.plot(sizes, gains, style, color=COLOURS["quota"], label=label)
        if break_even is not None:
            axes.plot([break_even], [1.0], "o", color=COLOURS["quota"])
    axes.axhline(1.0, color=COLOURS["off"], linewidth=1)
    axes.axvline(advice.batch_tokens, color=COLOURS["off"], linestyle=":", label="this trace")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per batch, all ranks")
    axes.set_ylabel("predicted prefill throughput / off")
    axes.set_title(f"When moving weights pays (quota, in every layer): {_title(advice)}")
    axes.legend(frameon=False, loc="lower right")
