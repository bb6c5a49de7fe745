"""Advice, replays and simulations in pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.advise.advice import NEEDS_NO_SLOTS, Advice, Forecast
from ultraep_lab.advise.recommend import named_slots
from ultraep_lab.pictures import picture
from ultraep_lab.replay import Replay
from ultraep_lab.simulate.simulation import Simulation

__all__ = ["draw", "draw_replay", "draw_simulations"]

COLOURS = {
    "off": "#555555",
    "quota": "#0072b2",
    "eplb": "#d55e00",
    "eplb-slots": "#e69f00",
    "lplb": "#009e73",
    "llep": "#cc79a7",
    "exact": "#56b4e9",
    "ideal": "#999999",
}  # Okabe and Ito's, which colour-blind readers can tell apart
MARKERS = "osDv^<>P"
OWN_COLOURS = ("#882255", "#117733", "#332288")  # of policies without a colour above
SLOT_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
WIDTHS = (4.5, 3.0, 2.0, 1.2)  # what is drawn later is thinner, so that equal lines all show
CURVE_POINTS = 120
CURVE_STYLES = ("-", "--", ":")


def draw(advice: Advice, slots: int) -> Mapping[str, bytes]:
    """Three PNGs by file name; pictures over time are of ``slots`` per rank.

    Raises UnsupportedError where matplotlib is not installed.
    """
    return {
        "imbalance.png": picture(lambda axes: _imbalance(axes, advice, slots)),
        "gain-by-slots.png": picture(lambda axes: _gain(axes, advice)),
        "break-even.png": picture(lambda axes: _break_even(axes, advice)),
    }


def draw_replay(result: Replay) -> Mapping[str, bytes]:
    """A PNG by file name: imbalance by batch, by layer and over all cases, of every policy.

    Raises UnsupportedError where matplotlib is not installed.
    """
    batch, layer = np.array(result.cases).T
    by_time = not result.context.is_equally_fast
    before = result.time_imbalance_before if by_time else result.imbalance_before
    curves = {} if "off" in result.policies else {"not balanced": np.array(before)}
    for name, found in result.policies.items():
        after = found.time_imbalance_after if by_time else found.imbalance_after
        curves[name] = np.array(after)
    word = "busiest rank / mean" + ", of time" * by_time
    paints = (
        lambda axes: _means_by(axes, curves, batch, f"batch (mean of layers)\n{word}"),
        lambda axes: _means_by(axes, curves, layer, f"MoE layer (mean of batches)\n{word}"),
        lambda axes: _shares(axes, curves, word),
    )
    return {"replay.png": picture(*paints, size=(12.0, 3.6), columns=3)}


def _means_by(
    axes: Any, curves: Mapping[str, NDArray[np.float64]], number: NDArray[np.int64], label: str
) -> None:
    """The mean of each curve (n,) by ``number`` (n,)."""
    places = np.unique(number)
    for index, (name, values) in enumerate(curves.items()):
        means = [values[number == place].mean() for place in places]
        look = {"color": _colour(name, index), "linewidth": _width(index)}
        axes.plot(places, means, marker=MARKERS[index % len(MARKERS)], markersize=3, **look)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(label.partition("\n")[0])
    axes.set_ylabel(label.partition("\n")[2])


def _shares(axes: Any, curves: Mapping[str, NDArray[np.float64]], word: str) -> None:
    """Which share of layers has at most which imbalance, with the legend for all."""
    shares = np.linspace(0, 100, CURVE_POINTS)
    for index, (name, values) in enumerate(curves.items()):
        look = {"color": _colour(name, index), "linewidth": _width(index)}
        axes.plot(np.percentile(values, shares), shares, label=name, **look)
    axes.set_xlabel(word)
    axes.set_ylabel("% of layers at most this imbalanced")
    _legend(axes)


def _colour(name: str, index: int) -> str:
    return COLOURS.get(name, OWN_COLOURS[index % len(OWN_COLOURS)])


def draw_simulations(simulations: Sequence[Simulation]) -> Mapping[str, bytes]:
    """An SVG by file name: which share of layers has at most which imbalance.

    Raises UnsupportedError where matplotlib is not installed.
    """
    return {
        "simulation.svg": picture(lambda axes: _distributions(axes, simulations), file_type="svg")
    }


def _distributions(axes: Any, simulations: Sequence[Simulation]) -> None:
    """Before and after of every variant; of times where speeds differ, which includes counts."""
    shares = np.linspace(0, 100, CURVE_POINTS)
    seen: set[tuple[int, ...]] = set()
    for index, simulation in enumerate(simulations):
        variant = simulation.variant
        size = (variant.setting.num_ranks,)
        colour = SLOT_COLOURS[index % len(SLOT_COLOURS)]
        style = CURVE_STYLES[index // len(SLOT_COLOURS) % len(CURVE_STYLES)]
        if size not in seen:
            seen.add(size)
            before = np.percentile(simulation.column("time_before"), shares)
            look = {"color": COLOURS["off"], "linestyle": CURVE_STYLES[(len(seen) - 1) % 3]}
            axes.plot(before, shares, label=f"EP{size[0]}, not balanced", **look)
        after = np.percentile(simulation.column("time_after"), shares)
        axes.plot(after, shares, style, color=colour, label=variant.name, linewidth=_width(index))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("busiest rank / mean, of time")
    axes.set_ylabel("% of layers that are at most this imbalanced")
    ranks = simulations[0].groups * simulations[0].variant.setting.num_ranks
    axes.set_title(f"{simulations[0].variant.setting.shape.name}, simulated, {ranks} ranks")
    _legend(axes)


def _title(advice: Advice) -> str:
    setting = advice.setting
    return f"{setting.shape.name}, EP{setting.num_ranks}, {setting.weight_type}"


def _imbalance(axes: Any, advice: Advice, slots: int) -> None:
    shown = [advice.off]
    shown += [o for o in advice.forecasts if o.policy in NEEDS_NO_SLOTS or o.slots == slots]
    for index, forecast in enumerate(shown):
        batches = np.arange(len(forecast.imbalance)) + advice.skipped_first
        look = {"color": COLOURS.get(forecast.policy), "marker": MARKERS[index % len(MARKERS)]}
        width = _width(index)
        size = 3 + 2 * width
        axes.plot(
            batches, forecast.imbalance, label=forecast.policy,
            linewidth=width, markersize=size, **look,
        )  # fmt: skip
        if forecast.planned_imbalance < 0.98 * forecast.mean_imbalance:
            label = f"{forecast.policy}, moving in every layer"
            axes.plot(batches, forecast.planned, ":", label=label, markersize=5, **look)
    if advice.floor > 1.01:
        floor = {"color": "#999999", "linestyle": ":", "label": "lowest possible in domains"}
        axes.axhline(advice.floor, **floor)
    axes.set_ylim(bottom=1.0 - 0.04 * (max(advice.off.imbalance) - 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(f"batch of {advice.batch_tokens:.0f} tokens")
    axes.set_ylabel("busiest rank / mean, mean over layers")
    axes.set_title(f"Imbalance as served with {named_slots(slots)} per rank: {_title(advice)}")
    _legend(axes)


def _gain(axes: Any, advice: Advice) -> None:
    by_policy: dict[str, list[Forecast]] = {}
    for forecast in advice.forecasts:
        by_policy.setdefault(forecast.policy, []).append(forecast)
    for index, (policy, forecasts) in enumerate(by_policy.items()):
        gains = [advice.gain(forecast) for forecast in forecasts]
        colour = COLOURS.get(policy)
        if policy in NEEDS_NO_SLOTS:
            needed = forecasts[0].slots_needed
            label = f"{policy} (takes {named_slots(needed)})" if needed else policy
            axes.axhline(gains[0], color=colour, linestyle="--", label=label)
            continue
        slots = [forecast.slots for forecast in forecasts]
        axes.plot(slots, gains, marker="o", color=colour, label=policy)
        for number, gain in zip(slots, gains, strict=True):
            if number == 0:
                continue  # all policies are near 1 there
            axes.annotate(
                f"{gain:.2f}", (number, gain), (0, -14 if index % 2 else 7),
                textcoords="offset points", ha="center", fontsize=8, color=colour,
            )  # fmt: skip
    axes.axhline(1.0, color=COLOURS["off"], linewidth=1, label="off")
    axes.margins(y=0.12)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("replica slots per rank")
    axes.set_ylabel("predicted prefill throughput / off")
    axes.set_title(f"Gain in batches of {advice.batch_tokens:.0f} tokens: {_title(advice)}")
    _legend(axes)


def _break_even(axes: Any, advice: Advice) -> None:
    served = [o for o in advice.forecasts if o.policy == "quota" and o.transfer.busiest_link]
    limits = [tokens for forecast in served if (tokens := advice.break_even(forecast)) is not None]
    marks = [advice.batch_tokens, *limits]
    sizes = np.geomspace(min(marks) / 16, max(marks) * 64, CURVE_POINTS)
    for index, forecast in enumerate(served):
        colour = SLOT_COLOURS[index % len(SLOT_COLOURS)]
        gains = [advice.gain_at(forecast, number) for number in sizes]
        break_even = advice.break_even(forecast)
        label = f"{named_slots(forecast.slots)}: "
        label += "never" if break_even is None else f"from {break_even} tokens"
        axes.plot(sizes, gains, color=colour, linewidth=_width(index), label=label)
        if break_even is not None:
            size = 4 + 2 * _width(index)
            axes.plot([break_even], [1.0], "o", color=colour, markersize=size)
    axes.axhline(1.0, color=COLOURS["off"], linewidth=1)
    axes.axvline(advice.batch_tokens, color=COLOURS["off"], linestyle=":", label="this trace")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per batch, all ranks")
    axes.set_ylabel("predicted prefill throughput / off")
    axes.set_title(f"When moving weights pays (quota, in every layer): {_title(advice)}")
    _legend(axes)


def _width(index: int) -> float:
    return WIDTHS[min(index, len(WIDTHS) - 1)]


def _legend(axes: Any) -> None:
    """Beside the axes, where it hides nothing."""
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
