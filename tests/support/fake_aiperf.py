"""A fake of AIPerf's executable: sends what it is told to at once, and writes what AIPerf writes.

Its times are made up: the shorter the better the policy in force, and the longer the higher the
rate. ``plan.json`` beside it says what goes wrong, and in which window.
"""

import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

__all__ = ["FakeAIPerf"]

_SCRIPT = """\
    #!PYTHON -S
    import json, os, pathlib, signal, sys, time, urllib.request

    here, words = pathlib.Path(__file__).parent, sys.argv[1:]
    plan = json.loads((here / "plan.json").read_text())
    if words == ["--version"]:
        print(plan["version"])
        sys.exit(plan["version_status"])
    given = dict(zip(words, words[1:]))
    lines = pathlib.Path(given["--input-file"]).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    calls = json.loads((here / "calls.json").read_text())
    calls.append({"words": words, "rows": rows, "environment": dict(os.environ)})
    (here / "calls.json").write_text(json.dumps(calls))

    def asked(url, body=None):
        head = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, head)) as reply:
            return json.loads(reply.read())

    wrong = plan["wrong"] if len(calls) == plan["wrong_window"] else ""
    out = pathlib.Path(given["--artifact-dir"])
    if wrong == "exit":
        print("00:00:00.000 ERROR    the dataset was not configured (manager.py:1)")
        sys.exit(1)
    if wrong == "hang":
        (here / "child").write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    policy = asked(plan["sidecar"] + "/v1/config")["policy"]
    turns = [turn for row in rows for turn in row.get("turns", ()) if turn.get("role") != "system"]
    for row in rows if not turns else ():
        body = {"prompt": row["text_input"], "max_tokens": 2, "stream": False}
        asked(given["--url"] + "/v1/completions", json.dumps(body).encode())
    rate = len(rows) / rows[-1]["timestamp"] * 1000 if not turns else 1.0
    mean = plan["delays"][policy] * rate * 1000
    requests = len(turns or rows)
    failed = requests // 2 if wrong == "requests" else 0
    good = mean <= float(given["--goodput"].split()[0].split(":")[1])

    def times(value):
        return {"unit": "ms", "avg": value, "p50": value, "p90": 2 * value, "p99": 3 * value}

    summary = {
        "request_count": {"avg": requests - failed},
        "was_cancelled": False,
        "time_to_first_token": times(mean),
        "inter_token_latency": times(10.0),
        "inter_chunk_latency": times(11.0),
        "request_throughput": {"avg": 1.5},
        "output_token_throughput": {"avg": 96.0},
        "goodput": {"avg": 1.5 if good else 0.0},
        "usage_prompt_tokens": {"avg": 64.0},
    }
    if not turns:
        summary["replay_sched_lag_p99"] = {"unit": "ms", "avg": plan["lag_ms"]}
    if wrong == "unknown":
        summary["time_to_first_token"]["unit"] = "fortnights"
    names = {"time_to_first_token": mean, "inter_token_latency": 10.0}
    metrics = {name: {"unit": "ms", "value": value} for name, value in names.items()}
    records = [{"error": None, "metrics": metrics} for _ in range(requests)]
    if failed:
        records[1:] = [{"error": {"message": "Internal Server Error"}}]
    text = "".join(json.dumps(record) + chr(10) for record in records)
    (out / "profile_export.jsonl").write_text(text)
    (out / "profile_export_aiperf.json").write_text(json.dumps(summary))
"""


class FakeAIPerf:
    """The executable in ``folder``, and what it was asked to do."""

    def __init__(self, folder: Path, sidecar_url: str, delays: dict[str, float]) -> None:
        self.folder, self.path = folder, folder / "aiperf"
        self.path.write_text(dedent(_SCRIPT).replace("PYTHON", sys.executable, 1))
        self.path.chmod(0o755)
        (folder / "calls.json").write_text("[]")
        self._plan: dict[str, Any] = {
            "sidecar": sidecar_url,
            "delays": delays,
            "version": "0.13.0",
            "version_status": 0,
            "lag_ms": 1.0,
            "wrong": "",
            "wrong_window": 0,
        }
        self.plans()

    def plans(self, **changes: Any) -> None:
        """What it does from now on."""
        self._plan.update(changes)
        (self.folder / "plan.json").write_text(json.dumps(self._plan))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Words, requests and environment of every window."""
        calls: list[dict[str, Any]] = json.loads((self.folder / "calls.json").read_text())
        return calls
