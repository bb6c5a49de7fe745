"""Replays in pictures."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.pictures import picture
from ultraep_lab.replay import Replay

__all__ = ["draw_replay"]

COLOURS = {
    "off": "#555555",
    "quota": "#0072b2",
    "eplb": "#d55e00",
    "eplb-slots": "#e69f00",
    "lplb": "#009e73",
    "llep": "#cc79a7",
    "ideal": "#999999",
}  # Okabe and Ito's, which colour-blind readers can tell apart
MARKERS = "osDv^<>P"
OWN_COLOURS = ("#882255", "#117733", "#332288")  # of policies without a colour above
WIDTHS = (4.5, 3.0, 2.0, 1.2)  # what is drawn later is thinner, so that equal lines all show
CURVE_POINTS = 120


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


def _width(index: int) -> float:
    return WIDTHS[min(index, len(WIDTHS) - 1)]


def _legend(axes: Any) -> None:
    """Beside the axes, where it hides nothing."""
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
