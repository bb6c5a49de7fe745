"""Results of several runs are put together, or refused."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

from tests.emulated_gpu.kernels.check import _Played, _Totals

pytestmark = pytest.mark.interpreter


def written(path: Path, seeds: set[int], **said: str) -> Path:
    """What a run of one scenario left."""
    totals = _Totals(launches=10 * len(seeds), mistakes={"a fence removed": "race"})
    totals.played["one batch"] = _Played(seeds, 10 * len(seeds), 1000, 1.25, ["seed 3: wrong"])
    totals.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return path


def test_parts_add_up(tmp_path: Path) -> None:
    totals = _Totals()
    totals.read(written(tmp_path / "first.json", {0, 1, 3}))
    totals.read(written(tmp_path / "second.json", {2, 4}))
    played = totals.played["one batch"]
    assert (totals.launches, totals.seeds, totals.found, played.launches) == (50, 5, 1, 50)
    assert played.report()["which"] == [[0, 4]]
    assert played.failures == ["seed 3: wrong"] * 2
    assert not totals.is_right


def test_no_seed_counts_twice(tmp_path: Path) -> None:
    totals = _Totals()
    totals.read(written(tmp_path / "first.json", {0, 1, 3}))
    with pytest.raises(ValueError, match=r"seeds \[\[1, 1\], \[3, 3\]\]"):
        totals.read(written(tmp_path / "second.json", {1, 2, 3}))


def test_other_kernels_count_for_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="other kernels"):
        _Totals().read(written(tmp_path / "old.json", {0}, kernels="0123"))
