"""A collector of OpenTelemetry in this process, which keeps what it is sent."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

__all__ = ["HTTP", "Collector", "attributes", "by_http"]

HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}  # variables of who sends


class Collector:
    """What is sent to ``endpoint``, the address that a server of it sets."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.received: queue.SimpleQueue[ExportTraceServiceRequest] = queue.SimpleQueue()

    def resources(self) -> list[ResourceSpans]:
        """All that came since the last call."""
        found: list[ResourceSpans] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found += self.received.get_nowait().resource_spans
        return found

    def spans(self) -> list[Span]:
        """The same, without their resources."""
        return [span for part in self.resources() for of in part.scope_spans for span in of.spans]


@contextlib.contextmanager
def by_http(collector: Collector) -> Iterator[None]:
    """Receive by OTLP over HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.received.put(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield
        server.shutdown()


def attributes(span: Span) -> dict[str, Any]:
    """Values by name."""
    return {
        entry.key: getattr(entry.value, str(entry.value.WhichOneof("value")))
        for entry in span.attributes
    }
