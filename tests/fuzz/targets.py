"""What reads bytes of others, as functions of bytes: they return, or raise one of our errors.

A target is made once in a process and then called with millions of inputs, so each builds what it
needs before. Where checksums or keys keep damage away from the code behind them, an even first byte
of an input has them made right again.
"""

import base64
import contextlib
import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np

from tests.support.model_configs import DEEPSEEK_V3, QWEN3_30B
from tests.support.ring_files import create, write
from ultraep_lab.bench.endpoint import error_message, json_object
from ultraep_lab.engine_recordings import from_vllm
from ultraep_lab.errors import BenchError
from ultraep_lab.store import load_trace
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ControlError, RingError, UltraEPError
from ultraep_serve.launcher.engine import experts_of
from ultraep_serve.sidecar.balance import summarise
from ultraep_serve.sidecar.metrics import StoreCollector
from ultraep_serve.sidecar.store import NoRunError, RunStore
from ultraep_serve.system.files import parse_object
from ultraep_serve.system.settings import read_settings
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import record_checksum, record_dtype
from ultraep_serve.telemetry.ring import HEADER_BYTES
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import ExpertShape, Policy

Reader = Callable[[bytes], None]
_SHAPE = ExpertShape(num_ranks=2, num_logical_experts=8, num_replica_slots=1)
_CAPACITY = 8
_PAGE_START = 192  # bytes of a control page: its words, and a part of a holder
_REQUEST = httpx.Request("GET", "http://127.0.0.1/v1/balance")


class Target(NamedTuple):
    """A reader of bytes."""

    make: Callable[[Path], Reader]  # in a directory of its own
    seeds: Callable[[Path], list[bytes]]
    max_bytes: int  # of an input
    share: int  # of the time, compared with others'


class _Ring:
    """A ring with some records, and one file that is a damaged copy of it."""

    def __init__(self, folder: Path) -> None:
        recorder = create(folder, shape=_SHAPE, ring_records=_CAPACITY)
        for batch in range(1, 5):
            for layer in range(3):
                loads = {"load_before": np.array([4, 0]), "load_after": np.array([2, 2])}
                write(recorder, batch, layer, **loads)
        recorder.close()
        self.path = RunFiles(folder).ring(0)
        self.content = self.path.read_bytes()
        self.size = record_dtype(_SHAPE).itemsize

    def damaged(self, data: bytes) -> bytes:
        """A copy in which ``data`` says what to overwrite: places and bytes, four and eight."""
        changed = bytearray(self.content)
        for place, piece in struct.iter_unpack("<I8s", data[1 : 1 + (len(data) - 1) // 12 * 12]):
            # Every other place is in the header's fields: the rest of its page is padding.
            start = place // 2 % (700 if place & 1 else len(changed))
            changed[start : start + 8] = piece
        del changed[len(self.content) :]
        if data[:1] and not data[0] & 1:
            self._seal(changed)
        return bytes(changed[: len(changed) - (struct.unpack("B", data[:1])[0] & 2) * 200])

    def _seal(self, changed: bytearray) -> None:
        """Make the checksums right."""
        for start in range(HEADER_BYTES, len(changed), self.size):
            record = memoryview(changed)[start : start + self.size]
            seq = int.from_bytes(record[:8], "little")
            record[8:16] = record_checksum(seq, record).to_bytes(8, "little")


def _rewrite(descriptor: int, content: bytes) -> None:
    """Have ``content`` in an open file, and nothing else."""
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))


def _ring_seeds(_: Path) -> list[bytes]:
    places = [(1, bytes(8)), (8 * 2 + 1, b"\xff" * 8), (HEADER_BYTES * 2, bytes(8))]
    places += [((HEADER_BYTES + 40) * 2, b"\xff" * 8), (301, b"\2" * 8)]
    words = [struct.pack("<I8s", *place) for place in places]
    return [b"\0" + word for word in words] + [b"\0" + b"".join(words), b"\1" + words[3], b"\2"]


def _rings(folder: Path) -> Reader:
    ring = _Ring(folder)
    descriptor = os.open(ring.path, os.O_RDWR)

    def read(data: bytes) -> None:
        _rewrite(descriptor, ring.damaged(data or b"\0"))
        with contextlib.suppress(RingError), contextlib.closing(RingReader(ring.path)) as reader:
            poll = reader.poll()
            assert len(poll.records) <= _CAPACITY

    return read


def _figures(folder: Path) -> Reader:
    """All that the sidecar makes of a ring: two polls, an answer, and metrics."""
    ring = _Ring(folder)
    descriptor = os.open(ring.path, os.O_RDWR)

    def read(data: bytes) -> None:
        _rewrite(descriptor, ring.damaged(data or b"\0"))
        store = RunStore(folder)
        store.poll()
        run = store.poll()
        with contextlib.suppress(NoRunError):
            summarise(run).model_dump_json()
        for family in StoreCollector(store).collect():
            for sample in family.samples:  # as a scraper is sent them
                assert isinstance(float(sample.value), float)
                assert all(isinstance(label, str) for label in sample.labels.values())

    return read


def _pages(folder: Path) -> Reader:
    with ControlPage.create(folder, Policy.QUOTA) as page:
        path = page.file.path
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDWR)

    def read(data: bytes) -> None:
        os.pwrite(descriptor, data[:size].ljust(_PAGE_START, b"\0"), 0)
        with contextlib.suppress(ControlError), ControlPage.open(folder) as page:
            assert page.policy is Policy.OFF or not page.is_in_doubt
            page.set_policy(Policy.OFF)

    return read


def _page_seeds(folder: Path) -> list[bytes]:
    with ControlPage.create(folder, Policy.QUOTA) as page:
        first = page.file.read(_PAGE_START)
        page.switch_off_in_doubt()
        return [first, page.file.read(_PAGE_START), first[:8]]


def _traces(folder: Path) -> Reader:
    path = folder / "trace.npz"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(UltraEPError):
            load_trace(path, max_bytes=1 << 20)

    return read


def _trace_seeds(_: Path) -> list[bytes]:
    ids = {
        "topk_ids": np.ones((4, 2, 2), np.int16), "metadata": np.array('{"num_experts": 8}'),
        "sequence_lengths": np.array([4], np.int32),
    }  # fmt: skip
    loads = {"loads": np.ones((2, 2, 8), np.int32), "phase": np.zeros(2, np.uint8)}
    contents = []
    for arrays in (ids, loads):
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        contents.append(stream.getvalue())
    return contents


def _routed(folder: Path) -> Reader:
    """vLLM's answers. An even first byte: the array in one that is right is what follows."""
    path = folder / "answers.json"

    def read(data: bytes) -> None:
        saved = data[:1] and not data[0] & 1
        path.write_bytes(_routed_answer(data[1:]) if saved else data[1:])
        with contextlib.suppress(UltraEPError):
            from_vllm([path])

    return read


def _routed_answer(array: bytes) -> bytes:
    choice = {"routed_experts": base64.b64encode(array).decode()}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}}).encode()


def _routed_seeds(_: Path) -> list[bytes]:
    stream = io.BytesIO()
    np.save(stream, np.arange(16, dtype=np.uint8).reshape(4, 2, 2))
    return [b"\0" + stream.getvalue(), b"\1" + _routed_answer(stream.getvalue())]


def _configs(_: Path) -> Reader:
    """The first byte says what kind of JSON follows."""
    kinds: list[Callable[[str], object]] = [
        BalanceConfig.from_json,
        lambda text: CostModel.from_json(text).integer_costs(),
        lambda text: experts_of(parse_object(text, "config.json")),
    ]

    def read(data: bytes) -> None:
        text = data[1:].decode(errors="surrogateescape")
        with contextlib.suppress(UltraEPError):
            kinds[data[0] % len(kinds) if data else 0](text)

    return read


def _config_seeds(_: Path) -> list[bytes]:
    costs = {"seconds_per_assignment": 1e-6, "bytes_per_expert": 10**6, "link_bytes_per_second": 1}
    settings = BalanceConfig(speeds="1.0,0.6").to_json()
    shapes = DEEPSEEK_V3, QWEN3_30B, {"text_config": QWEN3_30B}
    texts = [settings, '{"policy": "off"}', '{"sidecar": {"port": 0}}']
    parts = [b"\0" + text.encode() for text in texts] + [b"\1" + json.dumps(costs).encode()]
    return parts + [b"\2" + json.dumps(shape).encode() for shape in shapes]


def _files_of_settings(folder: Path) -> Reader:
    path = folder / "settings.yaml"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(UltraEPError):
            BalanceConfig(**read_settings(path))

    return read


def _answers(_: Path) -> Reader:
    """What a server answers to a client of ours."""

    def read(data: bytes) -> None:
        response = httpx.Response(200, content=data, request=_REQUEST)
        assert len(error_message(response)) <= 400
        with contextlib.suppress(BenchError):
            json_object(response)

    return read


def _json_seeds(_: Path) -> list[bytes]:
    texts = ['{"error": {"message": "no"}}', '{"detail": [1, NaN]}', "[]", '{"a": 1e999, "b": ""}']
    return [text.encode() for text in texts]


def _run_files(folder: Path) -> Reader:
    """The small files of a run: the first byte says which."""
    files = RunFiles(folder)
    readers: dict[str, Callable[[], object]] = {
        "config.json": files.config, "lost": files.lost_reason, "unbalanced": files.unbalanced,
    }  # fmt: skip
    opened = [os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in readers]

    def read(data: bytes) -> None:
        number = data[0] % len(opened) if data else 0
        _rewrite(opened[number], data[1:])
        found = list(readers.values())[number]()
        assert found is None or isinstance(found, (dict, str, bool))

    return read


def _run_file_seeds(_: Path) -> list[bytes]:
    return [b"\0" + BalanceConfig().to_json().encode(), b"\1rank 1", b"\2no experts", b"\3"]


TARGETS = {
    "rings": Target(_rings, _ring_seeds, 121, 3),
    "figures": Target(_figures, _ring_seeds, 121, 2),
    "control-page": Target(_pages, _page_seeds, _PAGE_START, 4),
    "traces": Target(_traces, _trace_seeds, 2048, 3),
    "routed-answers": Target(_routed, _routed_seeds, 1024, 2),
    "configs": Target(_configs, _config_seeds, 2048, 10),
    "settings-yaml": Target(_files_of_settings, lambda _: [b"slots: 2\npolicy: off\n"], 256, 2),
    "run-files": Target(_run_files, _run_file_seeds, 512, 2),
    "answers": Target(_answers, _json_seeds, 512, 3),
}
