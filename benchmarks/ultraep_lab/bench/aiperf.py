"""NVIDIA AIPerf, the load generator behind ``bench load``: one window of traffic.

It runs as a process of its own, from an environment of its own: its requirements are not an
engine's. It is told when to send which text, so that every contender gets the same: requests at
fixed times, or conversations in which a turn follows the answer to the one before.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ultraep_serve.errors import BenchError, ConfigError, understood
from ultraep_serve.launcher.supervisor import start_child, stop_child
from ultraep_serve.system.environment import TOKEN_VARIABLE, child_environment
from ultraep_serve.system.http import MESSAGE_CHARACTERS

__all__ = [
    "RELEASE",
    "AIPerf",
    "Answer",
    "Conversation",
    "Request",
    "Turn",
    "WindowFigures",
    "read_answers",
]

RELEASE = "0.13"  # its flags and files are those of this release
INSTALL = (
    f"run `python3 -m venv aiperf && aiperf/bin/pip install 'aiperf=={RELEASE}.*'` and add "
    "--aiperf aiperf/bin/aiperf"
)
SUMMARY, REQUESTS = "profile_export_aiperf.json", "profile_export.jsonl"
ANSWER_METRICS = ("time_to_first_token", "inter_token_latency")
_VERSION_SECONDS, _STOP_SECONDS = 60.0, 10.0
_START_SECONDS = 120.0  # its own start and end, on a busy machine
# It loads a tokenizer even where the server counts tokens. This one knows no word, and is at hand.
_TOKENIZER = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"},
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    },
}
# Offline it would look for a local tokenizer among downloads; the token is nothing for it.
_NOT_FOR_IT = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", TOKEN_VARIABLE)


@dataclass(frozen=True)
class Request:
    """One line of a schedule."""

    seconds: float  # after the window's start
    prompt: str
    output_tokens: int


@dataclass(frozen=True)
class Turn:
    """What a conversation's client says next."""

    seconds: float  # after the answer before it
    text: str
    output_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Every turn is sent with the system prompt, all turns before it, and their answers."""

    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Answer:
    """One request's times, by AIPerf's definitions."""

    ttft_seconds: float
    itl_seconds: float  # mean time between its tokens


@dataclass(frozen=True)
class WindowFigures:
    """What AIPerf measured in one window, by its definitions."""

    ttft_mean_seconds: float
    ttft_p50_seconds: float
    ttft_p90_seconds: float
    ttft_p99_seconds: float
    itl_p50_seconds: float  # over requests, of each one's mean time between tokens
    itl_p90_seconds: float
    itl_p99_seconds: float
    pause_mean_seconds: float  # over all times between two chunks of an answer
    pause_p50_seconds: float
    pause_p90_seconds: float
    pause_p99_seconds: float
    requests_per_second: float  # from the first request sent to the last answer's end
    output_tokens_per_second: float
    goodput_per_second: float  # requests within all objectives
    prompt_tokens_mean: float  # as the server counted them
    lag_p99_seconds: float | None  # how late AIPerf sent a request; None without a schedule

    def to_json(self) -> dict[str, float | None]:
        """By the names above."""
        return asdict(self)


class AIPerf:
    """The executable; one ``measure`` per window."""

    def __init__(self, path: str = "aiperf") -> None:
        """``path`` as given to --aiperf. Raises ConfigError when it is missing or another one."""
        found = shutil.which(path)
        if found is None:
            raise ConfigError(f"{path} is no program here; bench load needs AIPerf: {INSTALL}")
        self._path = str(Path(found).absolute())
        self.version = self._version()
        if not f"{self.version}.".startswith(f"{RELEASE}."):
            raise ConfigError(f"{path} is AIPerf {self.version}, not {RELEASE}: {INSTALL}")

    def measure(
        self,
        url: str,
        model: str,
        requests: Sequence[Request],
        objective_seconds: float,
        timeout_seconds: float,
        keep: Path | None = None,
    ) -> WindowFigures:
        """Send ``requests`` at their times and wait for all answers.

        ``keep``: where AIPerf's own files go, also those of a window that fails. Raises BenchError
        with AIPerf's reason when it or any request fails.
        """
        rows = [
            {
                "timestamp": round(1000 * request.seconds, 3),
                "text_input": request.prompt,
                "output_length": request.output_tokens,
            }
            for request in requests
        ]
        flags = ["--endpoint-type", "completions", "--use-legacy-max-tokens", "--fixed-schedule"]
        flags += ["--custom-dataset-type", "mooncake_trace"]
        flags += ["--goodput", f"time_to_first_token:{1000 * objective_seconds:g}"]
        limit = requests[-1].seconds + timeout_seconds
        return self._profile(url, model, rows, len(rows), flags, timeout_seconds, limit, keep)

    def converse(
        self,
        url: str,
        model: str,
        conversations: Sequence[Conversation],
        at_a_time: int,
        objectives: Answer,
        timeout_seconds: float,
        keep: Path | None = None,
    ) -> WindowFigures:
        """Have all ``conversations`` in their order, ``at_a_time`` of them side by side.

        Closed loop: a turn is sent when the one before was answered and its seconds have passed.
        ``timeout_seconds`` is for all of it. ``keep`` and errors: as of ``measure``.
        """
        rows = [
            {
                "session_id": f"conversation-{i}",
                "turns": [
                    {"role": "system", "text": conversation.system},
                    *(
                        {
                            "text": turn.text,
                            "delay": 1000 * turn.seconds,
                            "output_length": turn.output_tokens,
                        }
                        for turn in conversation.turns
                    ),
                ],
            }
            for i, conversation in enumerate(conversations)
        ]
        objective = (
            f"time_to_first_token:{1000 * objectives.ttft_seconds:g} "
            f"inter_token_latency:{1000 * objectives.itl_seconds:g}"
        )
        flags = ["--endpoint-type", "chat", "--custom-dataset-type", "multi_turn"]
        flags += ["--num-sessions", str(len(rows)), "--dataset-sampling-strategy", "sequential"]
        flags += ["--concurrency", str(at_a_time), "--goodput", objective]
        turns = sum(len(conversation.turns) for conversation in conversations)
        limit = timeout_seconds
        return self._profile(url, model, rows, turns, flags, timeout_seconds, limit, keep)

    def _profile(
        self,
        url: str,
        model: str,
        rows: Sequence[Mapping[str, Any]],
        requests: int,
        flags: Sequence[str],
        timeout_seconds: float,
        limit: float,
        keep: Path | None,
    ) -> WindowFigures:
        """Run it on a file of ``rows`` that make so many requests, ``limit`` seconds at most."""
        with tempfile.TemporaryDirectory(prefix="ultraep-load-") as folder:
            directory = Path(folder)
            _write_inputs(directory, rows)
            command = [
                *(self._path, "profile", "--model", model, "--url", url, "--streaming"),
                *("--input-file", "requests.jsonl", *flags),
                *("--use-server-token-count", "--tokenizer", "./tokenizer"),
                *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
                *("--request-timeout-seconds", f"{timeout_seconds:g}"),
                *("--ui", "none", "--workers-max", "1", "--record-processors", "1"),
                # users of their own; a pooled one may be closed by the server as it is used again
                *("--connection-reuse-strategy", "never"),
                *("--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", "output"),
            ]
            with _kept(directory / "output", keep):
                code = self._run(command, directory, limit + _START_SECONDS)
                return _figures(directory / "output", code, requests)

    def _run(self, command: list[str], directory: Path, limit: float) -> int:
        """Its exit status; whatever happens here, none of its processes is left."""
        (directory / "output").mkdir()
        environment = child_environment(None, {"AIPERF_DATASET_MMAP_CACHE_ENABLED": "false"})
        for name in _NOT_FOR_IT:
            environment.pop(name, None)
        with (directory / "output" / "console.txt").open("wb") as log:
            child = start_child(command, environment, log, directory)
            try:
                return child.wait(limit)
            except subprocess.TimeoutExpired:
                raise BenchError(
                    f"aiperf did not end within {limit:g} s; read the server's log"
                ) from None
            finally:
                stop_child(child, _STOP_SECONDS)

    def _version(self) -> str:
        try:
            done = subprocess.run(
                [self._path, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{self._path} --version failed ({error}); {INSTALL}") from error
        words = done.stdout.split()
        if done.returncode or not words:
            raise ConfigError(f"{self._path} --version failed: {_last(done.stderr)}; {INSTALL}")
        return words[-1]


def read_answers(folder: Path) -> list[Answer]:
    """Every request's times, from the files that a window kept in ``folder``.

    Raises BenchError where they are not AIPerf's.
    """
    with understood(f"aiperf's {REQUESTS}"), (folder / REQUESTS).open(encoding="utf-8") as lines:
        records = [json.loads(line)["metrics"] for line in lines]
        return [
            Answer(*(_milliseconds(record, name) / 1000 for name in ANSWER_METRICS))
            for record in records
        ]


def _milliseconds(record: Mapping[str, Any], name: str) -> float:
    if (unit := record[name]["unit"]) != "ms":
        raise ValueError(f"{name} is in {unit}, not ms")
    return float(record[name]["value"])


def _write_inputs(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = map(json.dumps, rows)
    (directory / "requests.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (directory / "tokenizer").mkdir()
    for name, content in _TOKENIZER.items():
        (directory / "tokenizer" / name).write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def _kept(output: Path, keep: Path | None) -> Iterator[None]:
    """Afterwards ``output`` is in ``keep`` too."""
    try:
        yield
    finally:
        if keep is not None and output.is_dir():
            shutil.copytree(output, keep, dirs_exist_ok=True)


def _figures(output: Path, code: int, requests: int) -> WindowFigures:
    """From AIPerf's summary. Raises BenchError when that is missing or not of all requests."""
    try:
        summary = json.loads((output / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise BenchError(f"aiperf measured nothing: {_reason(output, code)}") from None
    with understood(f"aiperf's {SUMMARY}"):
        answered = round(summary["request_count"]["avg"])
        if code or answered < requests or summary["was_cancelled"]:
            raise BenchError(
                f"{requests - answered} of {requests} requests failed: {_reason(output, code)}"
            )
        ttft, itl, pause = (
            _seconds(summary, name) for name in (*ANSWER_METRICS, "inter_chunk_latency")
        )
        lag = "replay_sched_lag_p99"
        return WindowFigures(
            ttft_mean_seconds=ttft["avg"],
            ttft_p50_seconds=ttft["p50"],
            ttft_p90_seconds=ttft["p90"],
            ttft_p99_seconds=ttft["p99"],
            itl_p50_seconds=itl["p50"],
            itl_p90_seconds=itl["p90"],
            itl_p99_seconds=itl["p99"],
            pause_mean_seconds=pause["avg"],
            pause_p50_seconds=pause["p50"],
            pause_p90_seconds=pause["p90"],
            pause_p99_seconds=pause["p99"],
            requests_per_second=summary["request_throughput"]["avg"],
            output_tokens_per_second=summary["output_token_throughput"]["avg"],
            goodput_per_second=summary["goodput"]["avg"],
            prompt_tokens_mean=summary["usage_prompt_tokens"]["avg"],
            lag_p99_seconds=_seconds(summary, lag)["avg"] if lag in summary else None,
        )


def _seconds(summary: Mapping[str, Any], name: str) -> dict[str, float]:
    """A metric of times. Raises ValueError where AIPerf counts them otherwise."""
    metric = dict(summary[name])
    if (unit := metric.pop("unit")) != "ms":
        raise ValueError(f"{name} is in {unit}, not ms")
    return {statistic: value / 1000 for statistic, value in metric.items()}


def _reason(output: Path, code: int) -> str:
    """Why a window failed, in AIPerf's words: the first request's error, or its log's last one."""
    with suppress(OSError, ValueError, AttributeError), (output / REQUESTS).open() as lines:
        for line in lines:
            if error := json.loads(line).get("error"):
                return str(error.get("message"))[:MESSAGE_CHARACTERS]
    with suppress(OSError):
        console = (output / "console.txt").read_text(encoding="utf-8", errors="replace")
        errors = [line for line in console.splitlines() if " ERROR " in line]
        return f"{_last(errors[-1] if errors else console)} (exit status {code})"
    return f"exit status {code}"


def _last(text: str) -> str:
    """The last line that says something."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")[:MESSAGE_CHARACTERS]
