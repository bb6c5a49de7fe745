"""This package's lines in logs: text for people, or JSON objects for programs, one a line."""

import json
import logging
import os
import sys
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, Literal

__all__ = ["JsonFormatter", "LogFormat", "say", "set_up_logs"]

LogFormat = Literal["text", "json"]
_OURS = ("ultraep_serve", "vllm.ultraep_serve")  # loggers; the second has vLLM's handlers
_STANDARD_ERROR = 2


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the fields given as ``extra={"fields": ...}``."""

    def format(self, record: logging.LogRecord) -> str:
        """``record`` as text."""
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage().removeprefix("ultraep: "),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _JsonHandler(logging.Handler):
    """Writes to standard error past what engines put in front of every line of a process."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one whole line at once; where logs are full, nothing."""
        with suppress(OSError):
            os.write(_STANDARD_ERROR, f"{self.format(record)}\n".encode(errors="replace"))


def set_up_logs(log_format: LogFormat) -> None:
    """Have this process write our lines as JSON; as text they are left to the engine's handlers."""
    if log_format == "text" or _is_json():
        return
    handler = _JsonHandler()
    handler.setFormatter(JsonFormatter())
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def say(line: str, *, is_error: bool = False) -> None:
    """Write ``line`` to standard error, whatever the engine does with loggers."""
    if _is_json():
        logging.getLogger(_OURS[0]).log(logging.ERROR if is_error else logging.INFO, "%s", line)
        return
    with suppress(AttributeError, OSError, ValueError):  # it is full, or closed
        sys.stderr.write(f"ultraep: {'error: ' if is_error else ''}{line}\n")
        sys.stderr.flush()


def _is_json() -> bool:
    handlers = logging.getLogger(_OURS[0]).handlers
    return any(isinstance(handler, _JsonHandler) for handler in handlers)
