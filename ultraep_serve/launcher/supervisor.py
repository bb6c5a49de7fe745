"""Two child processes, the engine's server and the sidecar: start, watch and stop them."""

import contextlib
import ctypes
import http.client
import os
import signal
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import EngineEndedError, OutputError, RingError, UnsupportedError
from ultraep_serve.launcher.binding import CoreBinding
from ultraep_serve.launcher.tuned_kernels import TunedKernels
from ultraep_serve.system.environment import child_environment
from ultraep_serve.system.logs import say
from ultraep_serve.system.machine import killed_for_memory
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy

__all__ = ["EngineCommand", "start_child", "stop_child", "supervise"]

_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = (
    "the kernel killed a process for want of memory; raise the container's limit (docker run "
    "--memory, in Kubernetes limits.memory), or serve with a smaller --max-model-len"
)
_STOP_SECONDS = 30.0
_ASKED_SECONDS = 50.0  # for requests to end after a signal; a pod usually gets 60
_GROUP_SECONDS = 5.0
_HEALTH_SECONDS = 2.0
_LOOK_SECONDS = 1.0
_LOST_SECONDS = 3.0  # for an engine to end by itself once a rank or host was given up
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class EngineCommand:
    """How to start an engine's server; made by its adapter."""

    arguments: list[str]
    url: str | None  # where it will answer; None: this host has ranks and no server
    num_ranks: int  # on this host
    environment: dict[str, str] = field(default_factory=dict)  # defaults; the user's own win
    tuned: TunedKernels | None = None  # of kernels that the experts are computed with
    binding: CoreBinding | None = None  # on CPUs
    said: tuple[str, ...] = ()  # what was chosen for the user, a line each


def supervise(engine: EngineCommand, config: BalanceConfig, sidecar: list[str] | None) -> int:
    """Run ``engine`` to its end and return its exit code; the sidecar lives as long as it does.

    ``sidecar`` is its command; None: there is none. SIGINT and SIGTERM stop both. Raises
    UnsupportedError when the engine came up without being balanced, and EngineEndedError when a
    balanced engine ends by itself as if all were well, as vLLM does when it has lost a rank.
    """
    environment = child_environment(config.to_json(), engine.environment)
    children: list[subprocess.Popen[bytes]] = []
    watch, killed = _BalanceWatch(engine, config), killed_for_memory()
    with _forwarded_signals(children) as signals:
        try:
            if sidecar is not None:
                children.append(start_child(sidecar, child_environment(config.to_json(), {})))
            server = start_child(engine.arguments, environment)
            children.append(server)
            signals.repeat()
            watch.start(lambda: stop_child(server))
            code = _wait(server, signals, lambda: _lost(config))
            code = code if code >= 0 else 128 - code
            lost = _lost(config)
            if config.run_dir and not signals.received:
                _say_lost(config, lost or watch.problem or f"its engine ended (exit status {code})")
        finally:
            watch.stop()
            for child in reversed(children):
                stop_child(child)
    if code and not signals.received and killed_for_memory() > killed:
        say(_OUT_OF_MEMORY, is_error=True)
    if watch.problem:
        raise UnsupportedError(watch.problem, otherwise="")
    if lost and not signals.received:
        raise EngineEndedError(lost)
    if code == 0 and config.policy is not Policy.OFF and not signals.received:
        raise EngineEndedError(
            "the engine ended without being stopped, so a rank is lost, or another host was "
            "stopped; its log above says why; start it again"
        )
    return code


class _BalanceWatch:
    """Checks, once the engine answers, that every rank of this host is balanced.

    On a host without a server nothing shows that loading is over. Ranks there that do not balance
    are noticed by those of the first host, which wait for them while loading.
    """

    def __init__(self, engine: EngineCommand, config: BalanceConfig) -> None:
        self.problem = ""
        self._engine = engine
        self._config = config
        self._done = threading.Event()

    def start(self, stop_engine: Callable[[], None]) -> None:
        wanted = self._config.policy is not Policy.OFF and self._config.on_unsupported == "error"
        if wanted and self._engine.url is not None:
            threading.Thread(target=self._run, args=(stop_engine,), daemon=True).start()

    def stop(self) -> None:
        self._done.set()

    def _run(self, stop_engine: Callable[[], None]) -> None:
        while not _answers(f"{self._engine.url}/health"):
            if self._done.wait(_HEALTH_SECONDS):
                return
        num_ranks, ready = self._engine.num_ranks, self._num_ready()
        if ready < num_ranks:
            self.problem = (
                f"the server came up, but {num_ranks - ready} of {num_ranks} ranks here balance "
                "nothing: the model has no experts, or the engine did not load this package; "
                "serve with --policy off"
            )
            stop_engine()

    def _num_ready(self) -> int:
        files = RunFiles(self._config.run_path)
        return sum(_is_ready(files.ring(number)) for number in files.rings())


def _is_ready(ring: Path) -> bool:
    try:
        with contextlib.closing(RingReader(ring)) as reader:
            return reader.header().state is RingState.READY
    except RingError:
        return False


class _forwarded_signals:
    """While active, SIGINT and SIGTERM go to the children instead of ending this process."""

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        self._children = children
        self._previous: dict[int, object] = {}
        self.received = False

    def __enter__(self) -> "_forwarded_signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def repeat(self) -> None:
        """Pass on what arrived before the last child was among ``children``."""
        if self.received:
            self._forward(signal.SIGTERM, None)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.received = True
        for child in self._children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)


def start_child(
    arguments: list[str],
    environment: dict[str, str] | None,
    output: IO[bytes] | None = None,
    directory: Path | None = None,
) -> subprocess.Popen[bytes]:
    """A child in a group of its own (no terminal signals) that ends when this process is killed.

    It stays in this session: Linux may share cores out by session (``groups_sessions``), and then
    ranks that compute all the time would keep a sidecar or a client of another one waiting.
    ``environment`` and ``directory`` None: this process's; so are its streams, where no ``output``
    takes both.
    """
    return subprocess.Popen(
        arguments,
        env=environment,
        cwd=directory,
        stdout=output,
        stderr=output,
        preexec_fn=_before_child_runs,
    )


def _before_child_runs() -> None:
    os.setpgrp()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in (signal.SIGTTIN, signal.SIGTTOU):  # the terminal stops nobody in the background
        signal.signal(number, signal.SIG_IGN)


def _say_lost(config: BalanceConfig, reason: str) -> None:
    """Give the reason to ranks and hosts, before ranks are stopped and would say they leave."""
    with contextlib.suppress(OSError, OutputError):  # no room: hosts are told
        RunFiles(config.run_path).give_up(reason)


def _lost(config: BalanceConfig) -> str:
    return RunFiles(config.run_path).lost_reason() if config.run_dir else ""


def _wait(
    child: subprocess.Popen[bytes], signals: _forwarded_signals, lost: Callable[[], str]
) -> int:
    """The exit code of ``child``, waited for in steps instead of blocking.

    A signal that arrives just before a blocking wait begins would not be handled until it ends. A
    child that does not end after a signal is killed: ranks of SGLang on other hosts than the first
    wait for the first host to end them. So is one that does not end once ``lost`` gives a reason.
    """
    asked: float | None = None  # when a signal was seen
    ended: float | None = None  # when ranks were seen to have given up
    while True:
        try:
            return child.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            asked = (asked or now) if signals.received else None
            ended = ended or (now if lost() else None)
            if (asked is not None and now - asked > _ASKED_SECONDS) or (
                ended is not None and now - ended > _LOST_SECONDS
            ):
                child.kill()


def stop_child(child: subprocess.Popen[bytes], seconds: float | None = None) -> None:
    """Terminate ``child``, wait ``seconds``, then kill it and whatever it started."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_STOP_SECONDS if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    _end_group(child.pid)


def _end_group(group: int) -> None:
    """End what is left of a process group, after some time to remove its own shared memory."""
    deadline = time.monotonic() + _GROUP_SECONDS
    try:
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _answers(url: str) -> bool:
    # The certificate names the server as its users reach it, which is not by this address.
    any_name = ssl.create_default_context()
    any_name.check_hostname, any_name.verify_mode = False, ssl.CERT_NONE
    # Another's answer would be taken for the engine's: no proxy that the environment names.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=any_name)
    )
    try:
        with opener.open(url, timeout=_HEALTH_SECONDS) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):
        return False
