"""Conversations as agents have them, closed loop, two ranks on this machine, AIPerf as client.

    python benchmarks/agents.py --aiperf PATH --raw DIR

All conversations of a window begin with the same long system prompt and tools, and every turn
sends the whole conversation so far: the engine's prefix cache has nearly all of it. A turn is sent
when the one before was answered and a made-up tool has run. One conversation speaks of another
domain than the next. In every repeat each server is started anew, as in benchmarks/load.py.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import harness
from load import WITHOUT_EP, chosen, measure
from served import MODELS

from ultraep_lab.bench.aiperf import AIPerf, Answer, Conversation, Turn, read_answers
from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.load import ReadyFor
from ultraep_lab.bench.prefill import balanced_orders, ratios_json
from ultraep_lab.bench.prompts import Openings
from ultraep_lab.demo.balanced_server import installed_engine
from ultraep_lab.demo.text import DOMAINS, sample_text

# DeepSeek-R1, interactive, of the 99th percentile: MLCommons' inference_policies,
# inference_rules.adoc, July 2026. That is on GPUs: here both are multiplied by one number.
MLPERF = Answer(ttft_seconds=1.5, itl_seconds=0.015)
SCALES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)  # times MLPerf's limits
TIMEOUT_SECONDS = 600.0  # of a window
FIGURES = ("ttft_p50", "ttft_p90", "ttft_p99", "itl_p50", "itl_p90", "itl_p99")
SEEDS = 64  # of the texts of one conversation, more than it has turns


@dataclass(frozen=True)
class Traffic:
    """How agents talk; ranges are drawn from evenly, tokens are words."""

    conversations: int  # per window
    at_a_time: int
    system_tokens: int
    turns: tuple[int, int] = (6, 12)
    turn_tokens: tuple[int, int] = (128, 768)
    delay_seconds: tuple[float, float] = (0.1, 1.0)
    output_tokens: int = 48

    def drawn(self, repeat: int, openings: Openings) -> list[Conversation]:
        """One window's; the same for every contender but for the words that it opens with."""
        chooser = random.Random(repeat)
        system = sample_text(DOMAINS[0], self.system_tokens, seed=repeat)
        system = f"{openings.next(system)} {system}"
        return [self._conversation(chooser, system, repeat, i) for i in range(self.conversations)]

    def _conversation(
        self, chooser: random.Random, system: str, repeat: int, place: int
    ) -> Conversation:
        first_seed = (repeat * self.conversations + place + 1) * SEEDS
        turns = [
            Turn(
                chooser.uniform(*self.delay_seconds) if i else 0.0,
                sample_text(
                    DOMAINS[place % len(DOMAINS)],
                    chooser.randint(*self.turn_tokens),
                    first_seed + i,
                ),
                self.output_tokens,
            )
            for i in range(chooser.randint(*self.turns))
        ]
        return Conversation(system, tuple(turns))


@dataclass
class AgentRun:
    """The windows of one benchmark: to benchmarks/load.py what a LoadRun is."""

    aiperf: AIPerf
    traffic: Traffic
    scale: float
    raw: Path
    windows: list[dict[str, Any]] = field(default_factory=list)
    _openings: Openings = field(default_factory=Openings)

    def check(self, server: Server) -> None:
        """Raises ConfigError when ``server`` cannot take the longest conversation."""
        answered = self.traffic.turn_tokens[1] + self.traffic.output_tokens
        server.check_context(self.traffic.system_tokens + self.traffic.turns[1] * answered)

    def warm_up(self, ready_for: ReadyFor, contenders: Sequence[str]) -> None:
        """Unmeasured requests of several lengths: connections, compilation, buffers."""
        for contender in contenders:
            server = ready_for(contender)
            for tokens in (64, 512, 2048):
                text = sample_text(DOMAINS[0], tokens, seed=tokens)
                server.first_token(f"{self._openings.next(text)} {text}")

    def measure(self, ready_for: ReadyFor, contenders: Sequence[str], repeat: int) -> None:
        """A window of every contender, in an order that changes from repeat to repeat."""
        orders = balanced_orders(contenders)
        for contender in orders[repeat % len(orders)]:
            server = ready_for(contender)
            folder = self.raw / f"{contender}-{repeat + 1}"
            figures = self.aiperf.converse(
                server.url,
                server.model,
                self.traffic.drawn(repeat, self._openings),
                self.traffic.at_a_time,
                scaled(self.scale),
                TIMEOUT_SECONDS,
                folder,
            )
            good = {f"{scale:g}": share(read_answers(folder), scale) for scale in SCALES}
            about = {"contender": contender, "repeat": repeat + 1}
            self.windows.append({**about, **figures.to_json(), "good_share": good})
            print(json.dumps(self.windows[-1]), flush=True)


def scaled(scale: float) -> Answer:
    """MLPerf's limits, ``scale`` times."""
    return Answer(scale * MLPERF.ttft_seconds, scale * MLPERF.itl_seconds)


def share(answers: Sequence[Answer], scale: float) -> float:
    """Of answers within both limits."""
    limits = scaled(scale)
    return mean(
        one.ttft_seconds <= limits.ttft_seconds and one.itl_seconds <= limits.itl_seconds
        for one in answers
    )


def summary(windows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By contender: the means over repeats, and its ratios to quota within repeats."""
    rows = []
    for contender in dict.fromkeys(window["contender"] for window in windows):
        own = {w["repeat"]: w for w in windows if w["contender"] == contender}
        quota = {w["repeat"]: w for w in windows if w["contender"] == "quota"}
        names = [f"{name}_seconds" for name in FIGURES] + ["goodput_per_second"]
        row = {name: mean(w[name] for w in own.values()) for name in names}
        good = {
            f"{scale:g}": mean(w["good_share"][f"{scale:g}"] for w in own.values())
            for scale in SCALES
        }
        rows.append({"contender": contender, "repeats": len(own), **row, "good_share": good})
        if contender != "quota" and quota:
            pairs = [(own[i], quota[i]) for i in sorted(quota.keys() & own.keys())]
            rows[-1]["over_quota"] = {
                name: ratios_json([one[name] / other[name] for one, other in pairs])
                for name in names
                if all(other[name] for _, other in pairs)  # a goodput may be 0
            }
    return rows


def main() -> None:
    """Measure, print the windows, write the JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3")
    parser.add_argument("--contenders", default=f"{WITHOUT_EP},off,quota,ideal")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--aiperf", default="aiperf", help="AIPerf's executable")
    parser.add_argument("--raw", type=Path, required=True, help="where AIPerf's own files go")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=8, help="per window")
    parser.add_argument("--at-a-time", type=int, default=4, help="conversations side by side")
    parser.add_argument("--system-tokens", type=int, default=2048)
    parser.add_argument("--scale", type=float, choices=SCALES, default=2.0, help="of the limits")
    options = parser.parse_args()
    options.mode, options.engine = "tensor", installed_engine()
    traffic = Traffic(options.conversations, options.at_a_time, options.system_tokens)
    run = AgentRun(AIPerf(options.aiperf), traffic, options.scale, options.raw)
    path = options.json or Path(f"benchmarks/results/agents-{options.engine}.json")
    contenders = chosen(options)
    for repeat in range(options.repeats):
        for contender in contenders[:: 1 if repeat % 2 else -1]:
            measure(run, contender, repeat)
            harness.write(path, document(run, options))


def document(run: AgentRun, options: Any) -> dict[str, Any]:
    """What was measured so far."""
    limits = scaled(run.scale)
    return {
        "engine": options.engine,
        "model": options.model,
        "load_generator": f"aiperf {run.aiperf.version}, multi_turn",
        "traffic": vars(run.traffic),
        "limits": {"scale": run.scale, "mlperf": vars(MLPERF), **vars(limits)},
        "rows": summary(run.windows),
        "windows": run.windows,
    }


if __name__ == "__main__":
    main()
