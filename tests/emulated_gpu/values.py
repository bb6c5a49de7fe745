"""What has values on the emulated GPU: torch's operators, collectives, and engines' answers.

values.py FOUND                                  a row for each of these, and each way to serve
values.py FOUND PART ...                         the ways with a PART in their names, no more
values.py rank OUT MODEL EXPECTED WAY RANK       a process of one of the latter

Answers are greedy tokens in float32, compared with those of transformers on the CPU. Every engine
answers the same prompts balanced, with each of ``mistakes`` if there it makes them, balanced again,
and with policy off. All layers of all prefill batches are sampled. Tokens must all be those of
transformers, and samples must fail where a mistake is made and nowhere else.

DeepEP and FlashInfer combine in bfloat16, and experts in formats round too. There the prompts are
those of many whose next tokens are likelier than all others by most, by transformers in float32,
and the same in bfloat16 where that is served, so that rounding does not choose. transformers is
given what a format's weights stand for, and rounds what they are multiplied by as FP8 and INT8 do.
Experts in 4 bits compute in bfloat16: there balanced tokens must be those with policy off, and most
of them those of transformers.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "benchmarks" / folder) for folder in ("check_gpu", "device")]

import torch  # noqa: E402
from engine import NOT_FORKED, wait_for_all  # noqa: E402
from report import Report  # noqa: E402

from tests.emulated_gpu.engines import TYPE, Tokens, Way, start  # noqa: E402
from tests.emulated_gpu.libraries.check_collectives import check_collectives  # noqa: E402
from tests.emulated_gpu.mega_moe import check_mega_moe  # noqa: E402
from tests.emulated_gpu.mistakes import FOUND_BY, PLACE  # noqa: E402
from tests.emulated_gpu.operators.samples import check_operators  # noqa: E402
from tests.emulated_gpu.order import check_order  # noqa: E402
from tests.emulated_gpu.references.check import (  # noqa: E402
    check_attention,
    check_experts,
    check_experts_in_8_bits,
    check_marlin,
    check_sglangs_attention,
    moe_layer,
)
from tests.support.quantised import SCHEMES, Scheme, dequantise, quantise  # noqa: E402
from tests.support.tiny_models import tiny_qwen3  # noqa: E402
from tests.support.ways_to_start import SETTINGS, balanced_layers  # noqa: E402
from ultraep_lab.demo.models import make_model  # noqa: E402
from ultraep_lab.this_machine import free_port  # noqa: E402
from ultraep_serve.sidecar.proof import self_check_of, verification_of  # noqa: E402
from ultraep_serve.telemetry.control import ControlPage  # noqa: E402
from ultraep_serve.telemetry.reader import RingReader  # noqa: E402
from ultraep_serve.telemetry.run_directory import find_run  # noqa: E402
from ultraep_serve.types import Policy  # noqa: E402

SECONDS = 900
FEWEST, MOST, NEW_TOKENS, WORDS = 30, 300, 16, (5, 900)
POOL, FEWER_TOKENS = 90, 6  # from which those are chosen that rounding does not change
LARGEST_IMBALANCE = 1.02
FEWEST_RIGHT = 0.8  # of answers of experts in 4 bits
COUNTS = "answers", "same_balanced", "same_balanced_again", "same_off", "off_as_balanced"
CHECKED = {**SETTINGS, "self_check": "full", "verify_every": 1, "min_batch_tokens": 64}


DISPATCHES = (
    *("deepep_high_throughput", "deepep_low_latency", "deepep_v2"),
    "flashinfer_nvlink_one_sided",
)
FORMATS = "fp8", "fp8-tensor", "int8", "int4", "awq", "mxfp4", "nvfp4"
WAYS = (  # where copies stay none are made anew for prompts that are asked again, to be lost
    Way(mistakes=("slot", "id")),
    Way(decode_in_graphs=True),
    Way(parallel="data"),
    Way(runner=1),
    Way(prefix_cache=True),
    Way(slot_memory="shared", mistakes=tuple(FOUND_BY)),
    Way(ranks=4, experts_per_token=4),
    Way(ranks=4, experts_per_token=4, domain_size=2),
    *(Way(parallel="data", dispatch=name, experts_per_token=4) for name in DISPATCHES),
    Way(parallel="data", dispatch="deepep_v2", experts_per_token=4, may_capture=True),
    *(Way(format=name, prompts=14) for name in FORMATS),
    # FlashInfer's megakernel
    Way(parallel="data", dispatch="passthrough", format="nvfp4", prompts=14),
    Way("sglang", mistakes=("slot", "id")),
    Way("sglang", decode_in_graphs=True),
    Way("sglang", prefix_cache=True),
    Way("sglang", decode_in_graphs=True, slot_memory="shared", mistakes=tuple(FOUND_BY)),
    Way("sglang", parallel="data", decode_in_graphs=True),
    Way("sglang", parallel="data", decode_in_graphs=True, experts_per_token=4, ranks=4),
    Way("sglang", parallel="data", dispatch="deepep", experts_per_token=4, mistakes=("slot", "id")),
    Way("sglang", parallel="data", dispatch="deepep auto", experts_per_token=4),
    Way("sglang", parallel="data", dispatch="deepep", experts_per_token=4, ranks=4),
)


def main() -> None:
    """Rows for what all stands on, and one for every way."""
    from sglang.srt.plugins import load_plugins
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    load_plugins()
    report, parts = Report(Path(sys.argv[1])), sys.argv[2:]
    chosen = [way for way in WAYS if not parts or any(part in way.name for part in parts)]
    if not parts:
        report.run("torch's samples of its operators", check_operators)
        report.run("collectives", check_collectives)
        report.run("order between streams", check_order)
        report.run("vllm's native megakernel", check_mega_moe)
        report.run("vllm's attention", check_attention)
        report.run("sglang's attention", check_sglangs_attention)
        report.run("vllm's experts", check_experts)
        report.run("vllm's experts in 8 bits", check_experts_in_8_bits)
        report.run("vllm's experts in 4 bits (Marlin)", check_marlin)
    with tempfile.TemporaryDirectory() as folder:
        asked: dict[str, tuple[Path, Path]] = {}
        for way in chosen:
            sizes = *way.sizes.values(), way.prompts, way.experts_per_token
            model = "-".join([way.dtype, way.format, *map(str, sizes)])
            if model not in asked:
                asked[model] = make_questions(Path(folder, model), way)
            report.run(way.name, check, *asked[model], way)
    sys.exit(not report.all_passed)


def make_questions(folder: Path, way: Way) -> tuple[Path, Path]:
    """A model, and a file of prompts with their answers."""
    own = {"head_dim": 64, "experts_per_token": way.experts_per_token, **way.sizes}  # 4 heads
    spec = replace(tiny_qwen3(), **own)
    model, expected = make_model(folder / "model", spec), folder / "expected.json"
    plain = model
    if way.format:
        model = quantise(plain, folder / "quantised", way.format)
        plain = dequantise(model, folder / "dequantised", way.format)
    sizes = (POOL, FEWER_TOKENS) if way.dispatch or way.format else (way.prompts, NEW_TOKENS)
    answers = by_transformers(plain, *sizes, SCHEMES.get(way.format))
    if way.dtype != TYPE:
        less = by_transformers(plain, *sizes, None, torch.bfloat16)
        pairs = zip(answers, less, strict=True)
        answers = [own for own, other in pairs if own["tokens"] == other["tokens"]]
    decided = sorted(answers, key=lambda each: -each["margin"])[: way.prompts]
    expected.write_text(json.dumps(decided))
    return model, expected


def prompts(number: int) -> list[list[int]]:
    """Token ids."""
    by_chance = random.Random(5)
    sizes = [by_chance.randint(FEWEST, MOST) for _ in range(number)]
    return [[by_chance.randint(*WORDS) for _ in range(size)] for size in sizes]


def by_transformers(
    model: Path, number: int, tokens: int, scheme: Scheme | None, dtype: torch.dtype = torch.float32
) -> list[dict[str, Any]]:
    """Prompts, and tokens on the CPU, without a cache, so that nothing is shared with what is
    checked; ``margin`` is the least by which the likeliest token's logit is above all others'."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    settings: dict[str, Any] = {"dtype": dtype}
    if scheme is not None and (rounded := scheme.rounded) is not None:
        settings["experts_implementation"] = "rounded"

        def compute(own: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
            return moe_layer(x, weights, ids, own.gate_up_proj, own.down_proj, rounded)

        ALL_EXPERTS_FUNCTIONS.register("rounded", compute)
    network = AutoModelForCausalLM.from_pretrained(model, **settings).eval()
    found = []
    with torch.inference_mode():
        for prompt in prompts(number):
            ids, margin = list(prompt), float("inf")
            for _ in range(tokens):
                logits, likeliest = network(torch.tensor([ids])).logits[0, -1].topk(2)
                ids.append(int(likeliest[0]))
                margin = min(margin, float(logits[0] - logits[1]))
            found.append({"prompt": prompt, "tokens": ids[len(prompt) :], "margin": margin})
    return found


def check(model: Path, expected: Path, way: Way) -> dict[str, Any]:
    """What all ranks found, of which each was asked everything."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        port, started = free_port(), []
        environment = {**os.environ, **NOT_FORKED, PLACE: f"{folder}/mistake"}
        for rank in range(way.processes):
            out, own = Path(folder, f"{rank}.json"), way.environment(rank, port)
            given = [out, model, expected, json.dumps(asdict(way)), rank]
            command = [sys.executable, __file__, "rank", *map(str, given)]
            started.append(subprocess.Popen(command, env=environment | own))
        try:
            end = began + SECONDS
            codes = [process.wait(max(1, end - time.monotonic())) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        found = [json.loads(Path(folder, f"{n}.json").read_text()) for n in range(way.processes)]
    row: dict[str, Any] = found[0] | {"seconds": round(time.monotonic() - began, 1)}
    row |= {name: sum(of_rank[name] for of_rank in found) for name in COUNTS if name in row}
    require_right(row, way.mistakes, FEWEST_RIGHT if way.format and way.dtype != TYPE else 1)
    return row


def require_right(row: dict[str, Any], mistakes: Sequence[str], least: float) -> None:
    """Raise what is wrong with what was found."""

    def require(is_right: bool, problem: str) -> None:
        if not is_right:
            raise RuntimeError(f"{problem}: {row}")

    answers = row["answers"]
    require(row["off_as_balanced"] == answers, "balancing has changed a token")
    for name in ("same_balanced", "same_balanced_again", "same_off"):
        require(row.get(name, answers) >= least * answers, "a token is another one")
    require(row["self_check"] == "passed", "the self-check has not passed")
    require(bool(row["imbalance_by_layer"]), "nothing was balanced")
    for _, after in row["imbalance_by_layer"].values():
        require(after <= LARGEST_IMBALANCE, "imbalance is left")
    require(row.get("cached_tokens", 1) > 0, "no prefix was taken from the cache")
    samples = row["samples"]
    require(not samples["failures"] and samples["layers"], "samples failed, or there were none")
    for mistake in mistakes:
        found = row["mistakes"][mistake]
        require(found["failures"].get(FOUND_BY[mistake], 0) > 0, f"{mistake} was not found")
        require(found["switched_off"], f"{mistake} has not switched balancing off")


def number_alike(some: Tokens, others: Tokens) -> int:
    return sum(one == other for one, other in zip(some, others, strict=True))


class Asked:
    """An engine, asked the same prompts again and again."""

    def __init__(self, model: str, expected: Path, way: Way) -> None:
        self._expected, self._domain_size = json.loads(expected.read_text()), way.domain_size
        own = {"slot_memory": way.slot_memory, "domain_size": way.domain_size}
        self.engine = start(model, way, {**CHECKED, **own})
        self.run = find_run()
        self._rings = [self.run / f"ring-{rank}" for rank in range(way.ranks)]
        self.answers: Tokens = []  # the last ones

    def same(self) -> int:
        """Of all answers, those that have the tokens of transformers."""
        asked = [each["prompt"] for each in self._expected]
        self.answers = self.engine.generate(asked, len(self._expected[0]["tokens"]))
        return number_alike(self.answers, [each["tokens"] for each in self._expected])

    def shown(self) -> dict[str, Any]:
        """What the rings say: imbalance, the self-check, and samples."""
        headers = [RingReader(ring).header() for ring in self._rings]
        samples = verification_of(headers, is_off=False)
        by_check = {name: count.layers for name, count in samples.by_check.items()}
        return {
            "imbalance_by_layer": balanced_layers(self.run, self._domain_size),
            "self_check": self_check_of(headers).result,
            "samples": {"layers": samples.layers, "failures": samples.failures, **by_check},
        }

    def failures(self) -> dict[str, int]:
        """Samples that have failed, by what they check."""
        headers = [RingReader(ring).header() for ring in self._rings]
        by_check = verification_of(headers, is_off=False).by_check
        return {name: count.failures for name, count in by_check.items()}

    def mistaken(self, mistake: str) -> dict[str, Any]:
        """What comes of a mistake; afterwards balancing goes on."""
        place, before = Path(os.environ[PLACE]), self.failures()
        place.write_text(mistake)
        same = self.same()
        place.unlink()
        failures = {name: count - before[name] for name, count in self.failures().items()}
        with ControlPage.open(self.run) as page:
            is_off = page.policy is Policy.OFF
            page.set_policy(Policy.QUOTA)
        failed = {name: count for name, count in failures.items() if count}
        return {"same": same, "failures": failed, "switched_off": is_off}


def ask_as_rank(out: Path, model: str, expected: Path, way: Way, rank: int) -> None:
    """Ask balanced, with mistakes, and off once all have come to that; write what was found."""
    asked = Asked(model, expected, way)
    found: dict[str, Any] = {"answers": way.prompts, "same_balanced": asked.same()}
    balanced = asked.answers
    wait_for_all(out, "asked", rank, way.processes)
    found |= asked.shown()
    if way.mistakes:
        found["mistakes"] = {each: asked.mistaken(each) for each in way.mistakes}
        found["same_balanced_again"] = asked.same()
    if rank == 0:
        with ControlPage.open(asked.run) as page:
            page.set_policy(Policy.OFF)
    wait_for_all(out, "off", rank, way.processes)
    found |= {"same_off": asked.same(), "off_as_balanced": number_alike(balanced, asked.answers)}
    if way.prefix_cache:
        found["cached_tokens"] = asked.engine.cached
    out.write_text(json.dumps(found))
    wait_for_all(out, "done", rank, way.processes)
    asked.engine.end()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        *paths, chosen, number = sys.argv[2:]
        made = Way(**json.loads(chosen))
        place, checkpoint, tokens = paths
        ask_as_rank(Path(place), checkpoint, Path(tokens), made, int(number))
    else:
        main()
