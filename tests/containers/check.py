"""Real servers in containers as users have them: each serves and balances, or says what to do.

python -m tests.containers.check --json benchmarks/results/containers.json
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.containers.container import Container, Limits, container, shared_memory
from tests.support.serving_checks import MOVING_ALWAYS_PAYS
from tests.support.tiny_models import tiny_qwen3
from ultraep_lab.demo.models import make_model
from ultraep_serve.config import SidecarSettings
from ultraep_serve.system.files import write_json
from ultraep_serve.system.machine import describe

_SECONDS = 900.0  # for a server to come up or to refuse
_PORT = 8000
_SIDECAR_PORT = SidecarSettings().port_beside(_PORT)
_FLAGS = [
    *("--tensor-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager"),
    *("--dtype", "float32", "--max-model-len", "2048", "--port", str(_PORT)),
]
_HEALTHY = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{_PORT}/health', timeout=2)"
_ASK = f"""
import json, sys, urllib.request as u
body = {{"prompt": "law court judge " * 200, "max_tokens": 4, "model": sys.argv[1]}}
url = "http://127.0.0.1:{_PORT}/v1/completions"
head = {{"Content-Type": "application/json"}}
u.urlopen(u.Request(url, json.dumps(body).encode(), head), timeout=100).read()
balance = "http://127.0.0.1:{_SIDECAR_PORT}/v1/balance?policy=quota"
print(u.urlopen(balance, timeout=30).read().decode())
"""


@dataclass
class Seen:
    """What became of a container."""

    container: str
    seen: str  # serves, refuses, or what should not be
    said: str = ""  # the line of this package that tells why, where it refuses
    imbalance_before: float | None = None
    imbalance_after: float | None = None
    stop_seconds: float | None = None
    left: list[str] = field(default_factory=list)  # in the memory that it shares, at the end
    limited: tuple[str, ...] = ()  # kinds of control groups

    @property
    def is_fine(self) -> bool:
        """Whether it serves and balances and leaves nothing, or says what to do."""
        if self.seen == "serves":
            after = self.imbalance_after
            return after is not None and after < 1.1 and self.stop_seconds is not None
        return self.seen.startswith("refuses") and bool(self.said)


class Check:
    """Servers in containers, each with the same model and flags."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = make_model(folder / "model", tiny_qwen3())
        self._costs = folder / "costs.json"
        self._costs.write_text(MOVING_ALWAYS_PAYS.to_json())
        for file in self._model.iterdir():
            file.chmod(0o644)  # for the user inside
        self.rows: list[Seen] = []

    def server(
        self, name: str, limits: Limits, launcher: bool = True, **shared: Any
    ) -> AbstractContextManager[Container]:
        """A server of the tiny model, of this package's launcher or the engine's own command."""
        log = self._folder / f"{len(self.rows)}-{name}.log"
        if launcher:
            arguments = ["-m", "ultraep_serve.cli", "vllm", str(self._model), *_FLAGS]
            arguments += ["--costs", str(self._costs)]
        else:
            settings = {"costs": self._costs.read_text(), "sidecar": {"port": _SIDECAR_PORT}}
            setting = json.dumps({"ultraep": settings})
            module = "vllm.entrypoints.openai.api_server"
            arguments = ["-m", module, "--model", str(self._model), *_FLAGS]
            arguments += ["--additional-config", setting]
        return container(name, arguments, log, limits, **shared)

    def see(self, what: str, made: Container, shares_port: bool = False) -> Seen:
        """Wait until ``made`` serves or refuses, and ask it where it serves.

        Where it shares a port, another server would answer for it: it can but refuse.
        """
        row = Seen(what, _wait(made, may_serve=not shares_port), limited=made.limited)
        if row.seen == "serves":
            self._ask(made, row)
        elif row.seen == "refuses":
            row.said = _reason(made)
            if made.was_out_of_memory():
                row.seen += " after a process was out of memory"
        self.rows.append(row)
        print(f"{what}: {row}", flush=True)
        return row

    def _ask(self, made: Container, row: Seen) -> None:
        """Imbalance of a prompt, before and after."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            asked = made.in_its_network("-c", _ASK, str(self._model))
            if asked.returncode == 0:
                imbalance = json.loads(asked.stdout)["imbalance"]
                row.imbalance_before = round(imbalance["before"]["mean"], 3)
                row.imbalance_after = round(imbalance["after"]["mean"], 3)
                return
            time.sleep(2)  # the sidecar may come up after the server
        row.said = asked.stderr.splitlines()[-1]


def _wait(made: Container, *, may_serve: bool) -> str:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        if made.process.poll() is not None:
            return "refuses"
        with suppress(OSError, IndexError):  # it has just ended
            if may_serve and made.in_its_network("-c", _HEALTHY).returncode == 0:
                return "serves"
        time.sleep(2)
    return "hangs"


def _reason(made: Container) -> str:
    """The last line of this package that names an error, else the engine's that says what to do."""
    lines = [" ".join(line.split()) for line in made.text().splitlines() if "WARNING" not in line]
    own = [line for line in lines if line.startswith("ultraep") and "error: " in line]
    told = [line[line.index("Error: ") :] for line in lines if "Error: " in line]
    engine = [line for line in told if "See root cause" not in line]
    return (own or engine or [""])[-1]


def stop(row: Seen, made: Container, memory: Path | None = None) -> None:
    """Stop ``made``, and note what it leaves in ``memory``."""
    row.stop_seconds = made.stop()
    row.left = sorted(path.name for path in memory.iterdir()) if memory else []


def alone(check: Check, _: Path) -> None:
    """What Docker gives without flags, and too little memory for the model."""
    with check.server("small", Limits()) as made:
        check.see("Docker's defaults: 64 MB of /dev/shm", made)
    with check.server("tight", Limits(1024, shared_memory_mib=1024)) as made:
        check.see("1 GB of memory in all", made)


def beside(check: Check, _: Path) -> None:
    """Two with memory of their own."""
    with check.server("one", _LARGER) as one:
        first = check.see("1 GB of /dev/shm", one)
        with check.server("two", _LARGER) as two:
            second = check.see("a second one beside it, of the same port", two)
            stop(second, two)
        stop(first, one)


def shared(check: Check, folder: Path) -> None:
    """Two that share memory, and a third one that shares the network as well."""
    with (
        shared_memory(folder / "shm", 2048) as memory,
        check.server("three", _LARGER, memory=memory) as three,
    ):
        first = check.see("the first of two that share /dev/shm", three)
        with check.server("five", _LARGER, memory=memory, network_of=three) as five:
            what = "the same /dev/shm, network and port as the first"
            check.see(what, five, shares_port=True)
        with check.server("four", _LARGER, memory=memory) as four:
            second = check.see("the second, of the same port", four)
            stop(first, three)
            stop(second, four, memory)


def without_launcher(check: Check, folder: Path) -> None:
    """As ``shared``, by the engine's own command."""
    with (
        shared_memory(folder / "shm-engine", 2048) as memory,
        check.server("six", _LARGER, launcher=False, memory=memory) as six,
        check.server("seven", _LARGER, launcher=False, memory=memory) as seven,
    ):
        first = check.see("`vllm serve`: the first of two that share /dev/shm", six)
        second = check.see("`vllm serve`: the second, of the same port", seven)
        stop(first, six)
        stop(second, seven, memory)


_LARGER = Limits(shared_memory_mib=1024)
_GROUPS = {each.__name__: each for each in (alone, beside, shared, without_launcher)}


def main() -> int:
    """Exit status: 1 where one neither serves nor says what to do."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="*", choices=_GROUPS, default=list(_GROUPS))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # containers end with this process
    with tempfile.TemporaryDirectory(prefix="uep-containers-", dir="/var/tmp") as work:
        folder = Path(work)
        folder.chmod(0o755)
        check = Check(folder)
        for name in arguments.only:
            _GROUPS[name](check, folder)
    wrong = sum(not row.is_fine for row in check.rows)
    if arguments.json:
        rows = [asdict(row) for row in check.rows]
        document = {"command": "python -m tests.containers.check", "containers": rows}
        write_json(arguments.json, {**document, "machine": describe()})
    print(f"containers: {len(check.rows)}, {wrong} neither serve nor say what to do")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
