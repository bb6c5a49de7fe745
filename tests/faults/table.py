"""What must be seen of each fault in each stage, as ``injector`` says it; a dash: there is nothing
to fail yet, or any more.
"""

from collections.abc import Iterator

from tests.faults.injector import PROCESSES, STAGES, Fault

NONE = "\N{EN DASH}"
# Of a fault: start, load, serve, policy switch, stop.
EXPECTED: dict[tuple[str, str], tuple[str, ...]] = {}
_KILLED = ("SIGKILL", "SIGSEGV", "SIGHUP")
for _how in _KILLED:
    EXPECTED["sidecar", _how] = (NONE, "on", "on", "on", "ends")
    EXPECTED["server", _how] = ("ends",) * 5
    EXPECTED["rank", _how] = (NONE, "ends", "ends", "ends", "ends")
EXPECTED["sidecar", "SIGSTOP"] = (NONE, "on", "on", "on", "ends")
EXPECTED["server", "SIGSTOP"] = ("waits", "on", "on", "on", "waits")
EXPECTED["rank", "SIGSTOP"] = (NONE, "ends", "ends", "ends", "ends")
for _what in PROCESSES:
    for _how in ("no memory", "no room in files", "no descriptors"):
        _first = "ends" if _what == "server" else NONE
        EXPECTED[_what, _how] = (_first, "on", "on", "on", "ends")
# A rank that cannot write is not heard.
EXPECTED["rank", "no room in files"] = (NONE, "told", "told", "told", "ends")
EXPECTED["rank", "no descriptors"] = (NONE, "ends", "on", "on", "ends")
for _how in ("deleted", "truncated", "overwritten", "a pipe"):
    EXPECTED["ring", _how] = (NONE, "told", "told", "told", "ends")
    EXPECTED["control page", _how] = (NONE, "told", "told", "told", "ends")
    for _what in ("settings", "token"):
        EXPECTED[_what, _how] = (NONE, "on", "on", "on", "ends")
EXPECTED["ring", "overwritten"] = (NONE, "on", "on", "on", "ends")  # by its writer, in turn
EXPECTED["run directory", "deleted"] = (NONE, "told", "told", "told", "ends")

# A cell of each kind, for every run of the tests.
QUICK = (
    Fault("rank", "SIGSTOP", "serve"), Fault("sidecar", "SIGKILL", "policy switch"),
    Fault("ring", "truncated", "serve"),
)  # fmt: skip


def faults() -> Iterator[Fault]:
    """All that can be injected."""
    for (what, how), words in EXPECTED.items():
        for stage, word in zip(STAGES, words, strict=True):
            if word != NONE:
                yield Fault(what, how, stage)
