"""The servers of demo and benchmarks, with small commands in the engine's place."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.waiting import until

OWNER = """
import sys, time
from pathlib import Path
from ultraep_lab.demo.balanced_server import BalancedServer
ENGINE = '''
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(worker.pid, flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
'''
class Server(BalancedServer):
    def _command(self):
        return [sys.executable, "-c", ENGINE, str(self.port)]
log = Path(sys.argv[1])
with Server(Path("model"), [], log) as server:
    print(server.process_id, log.read_text().split()[0], flush=True)
    if sys.argv[2:]:
        time.sleep(600)
"""


def ended(process: int) -> bool:
    """Whether it is gone, or is only waited for by the process that adopted it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_stopped_server_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    for process in map(int, done.stdout.split()):
        until(partial(ended, process))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_when_its_owner_is_killed(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "log"), "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server, worker = map(int, owner.stdout.readline().split())
        assert not ended(server)
        owner.send_signal(number)
    try:
        until(partial(ended, server))  # a signal reaches it; an engine ends its ranks then
    finally:
        os.kill(worker, signal.SIGKILL)
