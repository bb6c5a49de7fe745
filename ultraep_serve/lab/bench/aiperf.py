"""NVIDIA AIPerf, the load generator behind ``bench load``: one window of a fixed schedule.

It runs as a process of its own, from an environment of its own: its requirements are not an
engine's. It is told when to send which text, so that every contender gets the same.
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

__all__ = ["RELEASE", "AIPerf", "Request", "WindowFigures"]

RELEASE = "0.13"  # its flags and files are those of this release
INSTALL = (
    f"run `python3 -m venv aiperf && aiperf/bin/pip install 'aiperf=={RELEASE}.*'` and add "
    "--aiperf aiperf/bin/aiperf"
)
SUMMARY, REQUESTS = "profile_export_aiperf.json", "profile_export.jsonl"
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
class WindowFigures:
    """What AIPerf measured in one window, by its definitions."""

    ttft_mean_seconds: float
    ttft_p50_seconds: float
    ttft_p90_seconds: float
    ttft_p99_seconds: float
    itl_p99_seconds: float  # over requests, of each one's mean time between tokens
    pause_p99_seconds: float  # over all times between two chunks of an answer
    requests_per_second: float  # from the first request sent to the last answer's end
    output_tokens_per_second: float
    goodput_per_second: float  # requests whose first token came within the objective
    prompt_tokens_mean: float  # as the server counted them
    lag_p99_seconds: float  # how late AIPerf sent a request

    def to_json(self) -> dict[str, float]:
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
        with tempfile.TemporaryDirectory(prefix="ultraep-load-") as folder:
            directory = Path(folder)
            _write_inputs(directory, requests)
            command = [
                *(self._path, "profile", "--model", model, "--url", url),
                *("--endpoint-type", "completions", "--streaming", "--use-legacy-max-tokens"),
                *("--input-file", "requests.jsonl", "--custom-dataset-type", "mooncake_trace"),
                *("--fixed-schedule", "--use-server-token-count", "--tokenizer", "./tokenizer"),
                *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
                *("--request-timeout-seconds", f"{timeout_seconds:g}"),
                *("--goodput", f"time_to_first_token:{1000 * objective_seconds:g}"),
                *("--ui", "none", "--workers-max", "1", "--record-processors", "1"),
                # users of their own; a pooled one may be closed by the server as it is used again
                *("--connection-reuse-strategy", "never"),
                *("--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", "output"),
            ]
            limit = requests[-1].seconds + timeout_seconds + _START_SECONDS
            with _kept(directory / "output", keep):
                code = self._run(command, directory, limit)
                return _figures(directory / "output", code, len(requests))

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


def _write_inputs(directory: Path, requests: Sequence[Request]) -> None:
    lines = [
        json.dumps(
            {
                "timestamp": round(1000 * request.seconds, 3),
                "text_input": request.prompt,
                "output_length": request.output_tokens,
            }
        )
        for request in requests
    ]
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
        ttft = _seconds(summary, "time_to_first_token")
        return WindowFigures(
            ttft_mean_seconds=ttft["avg"],
            ttft_p50_seconds=ttft["p50"],
            ttft_p90_seconds=ttft["p90"],
            ttft_p99_seconds=ttft["p99"],
            itl_p99_seconds=_seconds(summary, "inter_token_latency")["p99"],
            pause_p99_seconds=_seconds(summary, "inter_chunk_latency")["p99"],
            requests_per_second=summary["request_throughput"]["avg"],
            output_tokens_per_second=summary["output_token_throughput"]["avg"],
            goodput_per_second=summary["goodput"]["avg"],
            prompt_tokens_mean=summary["usage_prompt_tokens"]["avg"],
            lag_p99_seconds=_seconds(summary, "replay_sched_lag_p99")["avg"],
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
