"""The model has the code's names, and its results are of all forms."""

import json
import re
from dataclasses import asdict
from pathlib import Path

from tests.protocol.check import FABRIC, MISTAKES, RIGHT

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "protocol.json"


def test_the_models_names_are_the_codes() -> None:
    """Its steps are functions, its arrays are what these work on."""
    host = ROOT / "kernels" / "ultraep_kernels" / "host"
    files = [host / f"{name}.py" for name in ("exchange", "relays", "stream")]
    files.append(ROOT / "ultraep_serve" / "balance" / "host" / "fabric.py")
    code = "".join(file.read_text() for file in files)
    steps = set(re.findall(r"^inline (\w+)", FABRIC.read_text(), re.MULTILINE))
    invented = {"compute", "give_up", "send", "fill_slots", "make_plans"}
    assert steps >= invented
    unknown = [name for name in steps - invented if not re.search(rf"def _?{name}\b", code)]
    assert not unknown
    arrays = set(re.findall(r"^(?:hidden )?byte (\w+)\[", FABRIC.read_text(), re.MULTILINE))
    assert arrays == {"flags", "rows", "chunk_flags", "pools", "slot_expert", "parents"}
    assert not [name for name in arrays if not re.search(rf"\b_?{name}\b", code)]


def test_every_mistake_of_the_model_is_tried() -> None:
    seeded = set(re.findall(r"ifn?def MISTAKE_(\w+)", FABRIC.read_text()))
    assert {form.mistake for form in MISTAKES} == seeded
    assert len(seeded) >= 18


def test_published_results_are_of_all_forms_and_as_expected() -> None:
    results = json.loads(RESULTS.read_text())["results"]
    assert len(results) == len(RIGHT) + len(MISTAKES)
    for form, result in zip((*RIGHT, *MISTAKES), results, strict=True):
        for name, value in asdict(form).items():
            assert result[name] == value, (form, name)
        assert bool(result["found"]) == bool(form.mistake), form
        assert result["num_states"] > 0
        assert result["mebibytes"] < 4000
