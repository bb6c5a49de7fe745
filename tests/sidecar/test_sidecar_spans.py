"""A prefill batch is a span at the collector that the engine traces to, and nowhere otherwise."""

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.collector import HTTP, Collector, attributes, by_http
from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import SkewedRun
from ultraep_serve.balance.topology import PipelineStage
from ultraep_serve.sidecar.spans import SPAN_NAME, BatchSpans
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape

(PROTOCOL,) = HTTP


@contextlib.contextmanager
def by_grpc(collector: Collector) -> Iterator[None]:
    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, _: Any) -> Any:
            collector.received.put(request)
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield
    server.stop(None).wait()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """One that is asked by HTTP."""
    monkeypatch.setenv(PROTOCOL, HTTP[PROTOCOL])
    made = Collector()
    with by_http(made):
        yield made


@pytest.fixture
def spans() -> Iterator[BatchSpans]:
    made = BatchSpans()
    yield made
    made.close()


def look(spans: BatchSpans, store: RunStore) -> None:
    """Twice: what is complete at one look is sent at the next."""
    for _ in range(2):
        spans.look(store.poll())


def batches(found: list[Span]) -> list[int]:
    return [attributes(span)["ultraep.batch"] for span in found]


@pytest.mark.parametrize(
    ("protocol", "serving"), [("grpc", by_grpc), (HTTP[PROTOCOL], by_http)], ids=["grpc", "http"]
)
def test_a_batch_is_a_span_with_its_times_and_figures(
    protocol: str,
    serving: Callable[[Collector], contextlib.AbstractContextManager[None]],
    skewed_run: SkewedRun,
    tmp_path: Path,
    spans: BatchSpans,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PROTOCOL, protocol)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "the-engine")
    collector = Collector()
    with serving(collector):
        RunFiles(tmp_path).name_collector(collector.endpoint)
        store = RunStore(tmp_path)
        look(spans, store)
        before = time.time_ns()
        skewed_run.batch(1)
        skewed_run.batch(2, Decision.UNPROFITABLE)
        after = time.time_ns()
        look(spans, store)
        spans.close()
        (resource,) = collector.resources()
    named = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
    assert named["service.name"] == "the-engine"
    (scope,) = resource.scope_spans
    first, second = scope.spans
    assert {span.name for span in scope.spans} == {SPAN_NAME}
    assert before - 7000 <= first.start_time_unix_nano < first.end_time_unix_nano
    assert first.end_time_unix_nano <= second.end_time_unix_nano <= after
    seconds = {
        f"ultraep.seconds.{stage}": pytest.approx(2e-6)
        for stage in ("count", "exchange", "plan", "replicate", "reroute", "wait", "compute")
    }
    assert attributes(first) == {
        "ultraep.batch": 1,
        "ultraep.tokens": 100,
        "ultraep.policy": "quota",
        "ultraep.imbalance.before": 2.0,
        "ultraep.imbalance.after": 1.0,
        "ultraep.replicas": 2,
        "ultraep.moved_bytes": 200,
        "ultraep.avoided_seconds": pytest.approx(2e-6),
        "ultraep.layers.planned": 2,
        **seconds,
    }
    assert attributes(second)["ultraep.layers.unprofitable"] == 2


def test_a_batch_is_sent_once_and_when_it_is_complete(
    tmp_path: Path, collector: Collector, spans: BatchSpans
) -> None:
    shape = ExpertShape(num_ranks=2, num_logical_experts=8, num_replica_slots=1)
    stages = [
        SyntheticRun(tmp_path, shape, 2, seed=number, pipeline=PipelineStage(number, 2))
        for number in range(2)
    ]
    RunFiles(tmp_path).name_collector(collector.endpoint)
    store = RunStore(tmp_path)
    look(spans, store)
    for stage in stages:
        stage.batch()
    stages[0].batch()  # which the second stage has not come to
    look(spans, store)
    look(spans, store)
    stages[1].batch()
    look(spans, store)
    spans.close()
    assert batches(collector.spans()) == [1, 2]
    for stage in stages:
        stage.close()


def test_a_sidecar_that_comes_later_does_not_send_again(
    skewed_run: SkewedRun, tmp_path: Path, collector: Collector, spans: BatchSpans
) -> None:
    RunFiles(tmp_path).name_collector(collector.endpoint)
    skewed_run.batch(1)
    store = RunStore(tmp_path)
    look(spans, store)
    skewed_run.batch(2)
    look(spans, store)
    spans.close()
    assert batches(collector.spans()) == [2]


def test_a_run_that_is_started_again_numbers_its_batches_anew(
    skewed_run: SkewedRun, tmp_path: Path, collector: Collector, spans: BatchSpans
) -> None:
    RunFiles(tmp_path).name_collector(collector.endpoint)
    store = RunStore(tmp_path)
    look(spans, store)
    skewed_run.batch(7)
    look(spans, store)
    skewed_run.close()
    again = SkewedRun(tmp_path)
    look(spans, store)
    again.batch(1)
    look(spans, store)
    again.close()
    spans.close()
    assert batches(collector.spans()) == [7, 1]


def test_an_engine_that_does_not_trace_costs_nothing(skewed_run: SkewedRun, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ultraep_serve.sidecar.spans import BatchSpans;"
        "from ultraep_serve.sidecar.store import RunStore; store = RunStore(Path(sys.argv[1]));"
        "spans = BatchSpans(); spans.look(store.poll()); spans.look(store.poll()); spans.close();"
        "sys.exit(str([name for name in sys.modules if name.startswith('opentelemetry')]))"
    )
    skewed_run.batch(1)
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("protocol", "missing", "said"),
    [
        ("grpc", "opentelemetry.sdk.trace", "pip install 'ultraep-serve[otel]'"),
        ("http/json", "", "'http/json'; use grpc or http/protobuf"),
    ],
)
def test_why_there_are_no_spans_is_said_once(
    protocol: str,
    missing: str,
    said: str,
    skewed_run: SkewedRun,
    tmp_path: Path,
    spans: BatchSpans,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(PROTOCOL, protocol)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    RunFiles(tmp_path).name_collector("http://127.0.0.1:9")
    store = RunStore(tmp_path)
    with caplog.at_level(logging.WARNING):
        look(spans, store)
        skewed_run.batch(1)
        look(spans, store)
    (record,) = caplog.records
    assert said in record.getMessage()
