"""What the sidecar says: one line at start, one per change of state, nothing per batch."""

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, Literal

from ultraep_serve.sidecar.store import RunStore

__all__ = ["LogFormat", "StateLog", "set_up_logging"]

_LOGGER = logging.getLogger("ultraep_serve.sidecar")
_SHOWN = 4  # reasons in a line of text
LogFormat = Literal["text", "json"]


def set_up_logging(log_format: LogFormat) -> None:
    """Log to standard error, as lines of text or of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _JsonFormatter(logging.Formatter):
    """One JSON object per line; what was given as ``extra={"fields": ...}`` is in it."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


class StateLog:
    """Says when readiness or the policy changes."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._problems: dict[str, str] | None = None
        self._policy: str | None = None

    def look(self) -> None:
        """Compare with the last look; the store was just polled."""
        problems = self._store.problems()
        known = self._problems
        # Not every wording, and not every rank that gets well while others are not.
        if known is None or bool(problems) != bool(known) or problems.keys() - known.keys():
            self._say_ready(problems)
        self._problems = problems
        policy = self._store.policy()
        name = policy.value if policy else None
        if name != self._policy:
            self._policy = name
            fields = {"event": "policy", "policy": name}
            _LOGGER.info("policy is %s", name, extra={"fields": fields})

    def _say_ready(self, problems: dict[str, str]) -> None:
        fields = {"fields": {"event": "state", "ready": not problems, "reasons": problems}}
        if not problems:
            _LOGGER.info("every rank is ready", extra=fields)
            return
        reasons = [f"{rank}: {reason}" for rank, reason in problems.items()]
        if len(reasons) > _SHOWN:
            reasons[_SHOWN:] = [f"and {len(reasons) - _SHOWN} more"]
        _LOGGER.warning("not ready: %s", "; ".join(reasons), extra=fields)
