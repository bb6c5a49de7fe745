"""A span of OpenTelemetry for every prefill batch, where the engine traces requests.

Spans go to the collector of the engine's own, by the protocol that the same variables choose, and
are of the same service, so that a request and the batches of its time are found together. Nothing
of OpenTelemetry is imported where the engine does not trace.
"""

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ultraep_serve import __version__
from ultraep_serve.sidecar.statistics.batches import BatchTimes, batch_times
from ultraep_serve.sidecar.statistics.held import Held
from ultraep_serve.sidecar.store import Run
from ultraep_serve.system.environment import engine_variable
from ultraep_serve.telemetry.run_files import RunFiles

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["SPAN_NAME", "BatchSpans", "span_attributes"]

SPAN_NAME = "ultraep.prefill_batch"
_PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_LAST_SECONDS = 3.0  # for sending what waits at the end
_LOGGER = logging.getLogger("ultraep_serve.sidecar")


class BatchSpans:
    """Sends the batches that are recorded from the first look on, each once.

    Of several hosts, the first one sends those of all.
    """

    def __init__(self) -> None:
        self._endpoint = ""
        self._sender: _Sender | None = None
        self._sent = 0  # the last batch
        self._complete = 0  # at the last look
        self._held: Held | None = None  # then

    def look(self, run: Run) -> None:
        """Send batches that were complete at the last look: by now all ranks' records are here."""
        held, endpoint = run.readable, RunFiles(run.path).collector()
        if endpoint and endpoint != self._endpoint:
            self._open(endpoint, _newest_complete(held) if held else 0)
        if self._sender is None or held is None or held.header.location.host.start:
            return
        if not len(held.primary):  # a new run, which numbers its batches anew
            self._sent = self._complete = 0
        self._send_complete(held)
        self._complete, self._held = _newest_complete(held), held

    def close(self) -> None:
        """Send what waits, for some seconds at most."""
        if self._sender is not None:
            if self._held is not None:
                self._send_complete(self._held)
            self._sender.close()
            self._sender = None

    def _send_complete(self, held: Held) -> None:
        if self._sender is not None and self._complete > self._sent:
            for batch in batch_times(held, self._sent, self._complete):
                self._sender.send(batch)
            self._sent = self._complete

    def _open(self, endpoint: str, newest: int) -> None:
        self.close()
        self._endpoint, self._held = endpoint, None
        self._sent = self._complete = newest
        protocol = engine_variable(_PROTOCOL_VARIABLE) or "grpc"
        try:
            self._sender = _Sender(endpoint, protocol)
        except ImportError as error:
            _LOGGER.warning(
                "the engine traces requests, but batches get no spans: %s; "
                "pip install 'ultraep-serve[otel]'",
                error,
            )
        except ValueError as error:
            _LOGGER.warning("batches get no spans: %s", error)
        else:
            _LOGGER.info("spans of prefill batches go to %s (%s)", endpoint, protocol)


def span_attributes(batch: BatchTimes) -> Mapping[str, int | float | str]:
    """What a span says of its ``batch``."""
    summary = batch.summary
    figures = {
        "batch": summary.batch,
        "tokens": summary.tokens,
        "policy": summary.policy,
        "imbalance.before": summary.imbalance.before.mean,
        "imbalance.after": summary.imbalance.after.mean,
        "replicas": summary.replicas,
        "moved_bytes": summary.bytes_moved,
        "avoided_seconds": summary.avoided_seconds,
        **{f"layers.{name}": count for name, count in summary.layers.items()},
        **{f"seconds.{name}": seconds for name, seconds in batch.stage_seconds.items()},
    }
    return {f"ultraep.{name}": value for name, value in figures.items() if value is not None}


def _newest_complete(held: Held) -> int:
    """The last batch of which every layer is recorded; 0 where there is none."""
    numbers, counts = np.unique(held.primary["batch"], return_counts=True)
    complete = numbers[counts >= held.header.num_layers]
    return int(complete[-1]) if len(complete) else 0


class _Sender:
    """Sends spans in a thread of its own, and drops what a collector does not take for long."""

    def __init__(self, endpoint: str, protocol: str) -> None:
        """Raises ImportError where the library is missing, ValueError for another protocol."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint, protocol)))
        self._tracer = self._provider.get_tracer("ultraep_serve", __version__)

    def send(self, batch: BatchTimes) -> None:
        attributes = span_attributes(batch)
        span = self._tracer.start_span(SPAN_NAME, attributes=attributes, start_time=batch.start_ns)
        span.end(batch.end_ns)

    def close(self) -> None:
        """Send what waits; a collector that is gone keeps nobody waiting for longer."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(_LAST_SECONDS)


def _exporter(endpoint: str, protocol: str) -> "SpanExporter":
    """As engines make theirs: by gRPC without TLS, or by HTTP."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter(endpoint=endpoint, insecure=True)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter(endpoint=endpoint)
    raise ValueError(f"{_PROTOCOL_VARIABLE} is {protocol!r}; use grpc or http/protobuf")
