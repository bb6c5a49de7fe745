"""Run directories, and the supervisor with small commands in the engine's place."""

import argparse
import os
import signal
import ssl
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from tests.support.launched import is_gone
from tests.support.ring_files import create
from ultraep_serve.cli import main, serve
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.launch import local_url
from ultraep_serve.errors import EngineEndedError, UnsupportedError
from ultraep_serve.launcher import supervisor
from ultraep_serve.launcher.supervisor import EngineCommand, supervise
from ultraep_serve.launcher.tuned_kernels import TunedKernels, link_tuned_kernels
from ultraep_serve.sidecar.serve import add_arguments as add_sidecar_arguments
from ultraep_serve.system.environment import CONFIG_VARIABLE
from ultraep_serve.system.machine import free_port
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry import run_directory as module
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.types import ExpertShape, Policy

OFF = BalanceConfig(policy=Policy.OFF)
FREE_URL = "http://127.0.0.1:9"  # nobody answers there
FATAL = (signal.SIGKILL, signal.SIGSEGV)


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /dev/shm, so that servers of this machine are left alone."""
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines here start at once."""
    monkeypatch.setattr(supervisor, "_HEALTH_SECONDS", 0.5)
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.1)


def python(code: str, **environment: str) -> EngineCommand:
    return EngineCommand([sys.executable, "-c", code], FREE_URL, 2, environment)


def test_the_engine_has_a_group_of_its_own_in_this_session(tmp_path: Path) -> None:
    """Terminal signals do not reach it, and no kernel that groups sessions sets it apart."""
    seen = tmp_path / "seen"
    code = f"import os; open({str(seen)!r}, 'w').write(f'{{os.getsid(0)}} {{os.getpgrp()}}')"
    assert supervise(python(code), OFF, None) == 0
    session, group = map(int, seen.read_text().split())
    assert session == os.getsid(0)
    assert group != os.getpgrp()


@pytest.mark.parametrize("code", [0, 3])
def test_the_engines_exit_code_passes_through(code: int) -> None:
    assert supervise(python(f"raise SystemExit({code})"), OFF, None) == code


@pytest.mark.parametrize("number", FATAL)
def test_a_killed_engine_gives_the_shells_code(number: signal.Signals) -> None:
    killed = f"import os; os.kill(os.getpid(), {int(number)})"
    assert supervise(python(killed), OFF, None) == 128 + number


def test_the_engine_gets_configuration_and_defaults(tmp_path: Path) -> None:
    code = (
        "import os, pathlib; pathlib.Path(os.environ['REPORT']).write_text("
        f"os.environ['{CONFIG_VARIABLE}'] + '|' + os.environ['ONE_DEFAULT'])"
    )
    report = tmp_path / "report"
    assert supervise(python(code, REPORT=str(report), ONE_DEFAULT="7"), OFF, None) == 0
    text, default = report.read_text().split("|")
    assert BalanceConfig.from_json(text) == OFF
    assert default == "7"


def test_the_sidecar_gets_no_defaults_of_the_engines(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    report = "import os, sys; print(*os.environ, sep='\\n', file=open(sys.argv[1], 'w'))"
    waits = "import os, time\nwhile not os.path.exists(os.environ['SEEN']): time.sleep(0.05)"
    engine = python(waits + "\ntime.sleep(0.2)", SEEN=str(seen))
    assert supervise(engine, OFF, [sys.executable, "-c", report, str(seen)]) == 0
    variables = seen.read_text().split()
    assert CONFIG_VARIABLE in variables
    assert "SEEN" not in variables


def test_an_engine_that_does_not_end_when_asked_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_ASKED_SECONDS", 0.5)
    up = tmp_path / "up"
    code = (
        "import os, pathlib, signal, time; signal.signal(15, signal.SIG_IGN);"
        "pathlib.Path(os.environ['UP']).touch(); time.sleep(600)"
    )

    def ask() -> None:
        while not up.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert supervise(python(code, UP=str(up)), OFF, None) == 128 + signal.SIGKILL
    asking.join()


def test_what_the_engine_started_and_left_is_stopped(tmp_path: Path) -> None:
    left = tmp_path / "left"
    code = (
        "import subprocess, sys, pathlib, os;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "pathlib.Path(os.environ['LEFT']).write_text(str(p.pid)); os._exit(0)"
    )
    assert supervise(python(code, LEFT=str(left)), OFF, None) == 0
    assert is_gone(int(left.read_text()))


def test_what_the_engine_left_may_clean_up_first(tmp_path: Path) -> None:
    worker = (
        "import pathlib, signal, sys, time;"
        "signal.signal(15, lambda *_: (pathlib.Path(sys.argv[1], 'clean').touch(), sys.exit()));"
        "pathlib.Path(sys.argv[1], 'up').touch(); time.sleep(60)"
    )
    code = (
        "import os, pathlib, subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {worker!r}, os.environ['HERE']])\n"
        "while not pathlib.Path(os.environ['HERE'], 'up').exists(): time.sleep(0.01)\n"
        "os._exit(0)"
    )
    assert supervise(python(code, HERE=str(tmp_path)), OFF, None) == 0
    assert (tmp_path / "clean").exists()


def test_the_engine_goes_on_without_its_run_directory(tmp_path: Path) -> None:
    run, end = tmp_path / "run", tmp_path / "end"
    run.mkdir()
    code = (
        "import pathlib, shutil, time\n"
        f"shutil.rmtree({str(run)!r}); time.sleep(0.5)\n"
        f"pathlib.Path({str(end)!r}).touch(); raise SystemExit(5)"
    )
    assert supervise(python(code), BalanceConfig(run_dir=str(run)), None) == 5
    assert end.exists()


def test_what_cannot_be_announced_does_not_keep_it_from_serving(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert sidecar_command([], monkeypatch) is not None
        with suppress(OSError):
            full.close()


def sidecar_command(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str] | None:
    """What the sidecar of a vLLM server with ``flags`` is started with; None: there is none."""
    started: list[list[str] | None] = []

    def note(_engine: EngineCommand, _config: BalanceConfig, sidecar: list[str] | None) -> int:
        started.append(sidecar)
        return 0

    monkeypatch.setattr(serve, "supervise", note)
    monkeypatch.setattr(serve.vllm, "find_spec", lambda name: name)
    two_ranks = ["--tensor-parallel-size", "2", "--enable-expert-parallel"]
    assert main(["vllm", "m", *two_ranks, "--port", str(free_port()), *flags]) == 0
    return started[0]


@pytest.mark.parametrize("flags", [[], ["--no-sidecar"], ["--policy", "off"]])
def test_the_sidecar_can_be_left_out(
    flags: list[str], shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (sidecar_command(flags, monkeypatch) is None) == bool(flags)


def test_the_sidecar_understands_what_it_is_started_with(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    add_sidecar_arguments(parser)
    flags = ["--sidecar-port", str(free_port())]
    flags += ["--sidecar-allowed-hosts", "a.example,b.example"]
    command = sidecar_command(flags, monkeypatch)
    assert command is not None
    assert command[:3] == [sys.executable, "-m", "ultraep_serve.sidecar"]
    found = parser.parse_args(command[3:])
    assert (str(found.port), found.host) == (flags[1], "127.0.0.1")
    assert found.allowed_hosts == "a.example,b.example"


def test_a_file_of_settings_reaches_engine_and_sidecar(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher as users start it, with a small command in the engine's place."""
    file, report, port = tmp_path / "ultraep.yaml", tmp_path / "report", free_port()
    file.write_text(f"slots: 3\nmax_imbalance: 1.5\nsidecar: {{port: {port}}}\n")
    code = f"import os; open({str(report)!r}, 'w').write(os.environ['{CONFIG_VARIABLE}'])"
    sidecars: list[list[str]] = []

    def without_sidecar(engine: EngineCommand, config: BalanceConfig, sidecar: list[str]) -> int:
        sidecars.append(sidecar)
        return supervise(engine, config.replace(policy=Policy.OFF), None)

    monkeypatch.setattr(serve, "supervise", without_sidecar)
    monkeypatch.setattr(serve.vllm, "engine_command", lambda *_: python(code))
    words = ["vllm", "m", "--ultraep-config", str(file), "--slots", "4", "--port", str(free_port())]
    assert main(words) == 0
    config = BalanceConfig.from_json(report.read_text())
    assert (config.slots, config.max_imbalance, config.sidecar) == (4, 1.5, None)
    assert [sidecars[0][i + 1] for i, word in enumerate(sidecars[0]) if word == "--port"] == [
        str(port)
    ]


def test_a_wrong_file_of_settings_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text("slotz: 3")
    for command in (["vllm", "m"], ["sglang", "m"], ["sidecar", "--run-dir", str(tmp_path)]):
        assert main([*command, "--ultraep-config", str(tmp_path / "wrong.yaml")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "unknown setting 'slotz'" in line
        assert "wrong.yaml" in line


@pytest.mark.parametrize(("policy", "raises"), [(Policy.QUOTA, True), (Policy.OFF, False)])
def test_a_balanced_engine_that_ends_by_itself_has_lost_a_rank(
    policy: Policy, raises: bool
) -> None:
    config = BalanceConfig(policy=policy)
    if raises:
        with pytest.raises(EngineEndedError, match="a rank is lost"):
            supervise(python("pass"), config, None)
    else:
        assert supervise(python("pass"), config, None) == 0


ANSWERING = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        return
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
import os, pathlib
"""


def test_an_engine_that_came_up_unbalanced_is_an_error(tmp_path: Path) -> None:
    """Also where something else answered before, and a ring is none."""
    (tmp_path / "ring-0").write_bytes(b"nonsense")
    port = free_port()
    code = ANSWERING.replace(", 0), Handler", f", {port}), Handler")
    code += """
accepted, _ = server.socket.accept()
accepted.recv(4096)
accepted.sendall(b"no HTTP\\r\\n\\r\\n")
accepted.close()
server.serve_forever()"""
    engine = EngineCommand([sys.executable, "-c", code], f"http://127.0.0.1:{port}", 2)
    config = BalanceConfig(run_dir=str(tmp_path))
    with pytest.raises(UnsupportedError, match="2 of 2 ranks here balance nothing"):
        supervise(engine, config, None)


def test_ranks_of_other_hosts_are_not_waited_for(tmp_path: Path) -> None:
    """The last two of four ranks are this host's, and balance."""
    shape = ExpertShape(4, 8, 1)
    recorders = [
        create(tmp_path, rank, shape, Location(rank, 4, 2, 2), num_layers=1) for rank in (2, 3)
    ]
    for recorder in recorders:
        recorder.set_state(RingState.READY)
    port = free_port()
    code = ANSWERING.replace(", 0), Handler", f", {port}), Handler")
    code += "import time\nserver.handle_request(); time.sleep(1); os._exit(3)"
    engine = EngineCommand([sys.executable, "-c", code], f"http://127.0.0.1:{port}", 2)
    config = BalanceConfig(run_dir=str(tmp_path))
    assert supervise(engine, config, None) == 3
    recorders[1].set_state(RingState.FAILED)
    with pytest.raises(UnsupportedError, match="1 of 2 ranks here balance nothing"):
        supervise(engine, config, None)
    for recorder in recorders:
        recorder.close()


def test_a_host_without_a_server_is_not_asked_whether_it_is_up(tmp_path: Path) -> None:
    command = EngineCommand([sys.executable, "-c", "raise SystemExit(3)"], None, 2)
    assert supervise(command, BalanceConfig(run_dir=str(tmp_path)), None) == 3


def test_an_engine_that_hangs_after_a_host_was_given_up_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores whoever asks, as a stopped process does."""
    monkeypatch.setattr(supervisor, "_LOST_SECONDS", 0.5)
    code = (
        "import signal, time; from pathlib import Path; signal.signal(signal.SIGTERM, "
        f"signal.SIG_IGN); Path({str(tmp_path / 'lost')!r}).write_text('host b was not heard'); "
        "time.sleep(60)"
    )
    config = BalanceConfig(policy=Policy.OFF, run_dir=str(tmp_path))
    with pytest.raises(EngineEndedError, match="host b was not heard"):
        supervise(python(code), config, None)


def test_tuned_kernels_are_found_by_the_experts_that_slots_make(tmp_path: Path) -> None:
    engine, target = tmp_path / "engine", tmp_path / "run" / "tuned"
    (engine / "configs").mkdir(parents=True)
    for name in ("E=16,N=64,device_name=X.json", "E=18,N=64,device_name=X.json", "other.json"):
        (engine / "configs" / name).write_text(name)
    tuned = TunedKernels("FOLDER", engine)
    assert link_tuned_kernels(tuned, 2, target) == {"FOLDER": str(target)}
    found = {path.name: path.read_text() for path in (target / "configs").iterdir()}
    assert found == {
        "E=16,N=64,device_name=X.json": "E=16,N=64,device_name=X.json",
        "E=18,N=64,device_name=X.json": "E=18,N=64,device_name=X.json",  # the engine's own
        "E=20,N=64,device_name=X.json": "E=18,N=64,device_name=X.json",
        "other.json": "other.json",
    }
    link_tuned_kernels(TunedKernels("FOLDER", engine, slot_sets=2), 1, tmp_path / "overlapping")
    assert (tmp_path / "overlapping" / "configs" / "E=20,N=64,device_name=X.json").exists()
    assert link_tuned_kernels(TunedKernels("FOLDER", tmp_path / "none"), 2, target) == {}


class Always(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_a_proxy_does_not_answer_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Always) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert not supervisor._answers(f"{FREE_URL}/health")
        assert supervisor._answers(f"http://127.0.0.1:{proxy.server_port}/health")
        proxy.shutdown()


def test_an_engine_that_serves_by_tls_answers_under_any_name() -> None:
    certificate = trustme.CA().issue_cert("models.example")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    with HTTPServer(("127.0.0.1", 0), Always) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = local_url("0.0.0.0", server.server_port, "certificate.pem")
        assert supervisor._answers(f"{url}/health")
        assert not supervisor._answers(f"{url.replace('https', 'http')}/health")
        server.shutdown()


LEFT_BEHIND = """
import os, signal, sys, time
from pathlib import Path
run_path = Path(sys.argv[1])
if os.fork():
    while not (run_path / "up").exists():
        time.sleep(0.01)
    sys.exit(3)

def stop(*_):
    (run_path / "heard").write_text((run_path / "lost").read_text())
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
(run_path / "up").touch()
time.sleep(60)
"""


def test_ranks_that_are_left_know_that_their_host_is_lost_when_they_are_stopped(
    tmp_path: Path,
) -> None:
    command = EngineCommand([sys.executable, "-c", LEFT_BEHIND, str(tmp_path)], FREE_URL, 2)
    config = BalanceConfig(policy=Policy.OFF, run_dir=str(tmp_path))
    assert supervise(command, config, None) == 3
    assert (tmp_path / "heard").read_text() == "its engine ended (exit status 3)"
