"""What the sidecar says to its log."""

import json
import logging
import time
from pathlib import Path

import pytest

from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import PLANNED_LAYERS, PLANNED_SHAPE
from ultraep_serve.ring.schema import RingState
from ultraep_serve.sidecar.app import StateLog
from ultraep_serve.sidecar.serve import set_up_logging
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.types import Policy


def test_one_line_per_change_of_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RunStore(tmp_path)
    log = StateLog(store)

    def lines() -> list[str]:
        caplog.clear()
        store.poll()
        log.update()
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO):
        assert len(lines()) == 1
        run = SyntheticRun(tmp_path, PLANNED_SHAPE, PLANNED_LAYERS)
        assert lines() == ["every rank is ready", "policy is quota"]
        run.batch()
        assert lines() == []
        run.recorders[1].set_state(RingState.FAILED)
        assert lines() == ["not ready: 1: state is failed"]
        assert lines() == []
        run.control.set_policy(Policy.OFF)
        run.recorders[1].set_state(RingState.READY)
        assert lines() == ["every rank is ready", "policy is off"]
        run.close()


def test_logs_can_be_json(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        set_up_logging("json")
        fields = {"event": "state", "ready": True}
        logging.getLogger("x").info("said %d", 1, extra={"fields": fields})
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["level"], line["event"]) == ("said 1", "info", "state")
    assert line["time"].startswith(time.strftime("%Y-%m-%d", time.gmtime()))
