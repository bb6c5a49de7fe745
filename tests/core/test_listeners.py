"""Who has a port: found in /proc, and named where a port is refused."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ultraep_lab.this_machine import free_port
from ultraep_serve.system.listeners import listener
from ultraep_serve.system.machine import why_not_listen

LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2])), family=int(sys.argv[3])):
    print(flush=True)
    input()
"""


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_another_process_is_named_with_its_command(host: str, family: int) -> None:
    port = free_port()
    words = [sys.executable, "-c", LISTEN, host, str(port), str(int(family))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        command = Path(f"/proc/{other.pid}/comm").read_text().strip()
        named = f"process {other.pid} ({command})"
        assert listener(port) == named
        assert why_not_listen(host, port) == f"Address already in use by {named}"
        other.communicate(b"\n")
    assert listener(port) is None
    assert why_not_listen(host, port) is None
