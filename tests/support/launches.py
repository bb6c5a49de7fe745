"""What the host does for one layer on the device path, counted; no GPU and no interpreter.

Launches are recorded instead of made, on tensors in host memory, so nothing is computed: what the
device would decide shows only where a test writes it.
"""

import ctypes
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from ultraep_kernels.device import launch as launch_module
from ultraep_kernels.device.stream import Programs

from tests.support.host_driver import HostDriver
from tests.support.mirror import FakeRecorder, bare_config, mirrored_balancer
from tests.support.offline import Launch, bound, recorded_launches
from tests.support.ring_files import create
from ultraep_serve.balance.backend import GroupSetup, row_width
from ultraep_serve.balance.cuda import micro_batch, pages, timing
from ultraep_serve.balance.cuda.balancer import DeviceBalancer
from ultraep_serve.balance.cuda.fabric import DeviceFabric
from ultraep_serve.balance.cuda.micro_batch import SideStream
from ultraep_serve.balance.cuda.pages import Page
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.ring import RING_RECORDS
from ultraep_serve.telemetry.run_directory import SHARED_MEMORY
from ultraep_serve.types import Decision, ExpertShape, Policy, TokenView

KINDS = ("balanced", "left_alone", "stayed", "off", "decode")
_SAID = {  # without copies in any slot
    "left_alone": Decision.BALANCED,
    "stayed": Decision.PLANNED,
    "off": Decision.POLICY_OFF,
}
MANY = 94  # layers, of Qwen3-235B
SHAPE, LAYERS, TOKENS, TOP_K, SMALL = ExpertShape(8, 64, 2), 4, 300, 4, 100
_VIEWS = {"view", "select", "slice", "split", "expand", "as_strided", "alias", "detach", "t"}
_VIEWS |= {"_unsafe_view", "unsqueeze", "squeeze", "transpose", "permute", "_reshape_alias"}
_ON_HOST = {"_local_scalar_dense", "is_pinned", "lift_fresh"}


@dataclass
class HostWork:
    """What was asked of the device, in order."""

    kernels: list[str] = field(default_factory=list)  # Triton's, by name
    operations: list[str] = field(default_factory=list)  # torch's, each a kernel or more
    allocations: int = 0
    copies: int = 0  # that no kernel makes
    events: int = 0  # recorded
    waits: int = 0  # of the host for the device

    @property
    def launches(self) -> int:
        """Kernels of either kind."""
        return len(self.kernels) + len(self.operations)


class _Operations(TorchDispatchMode):
    """Notes what torch would do on a device."""

    def __init__(self, work: HostWork) -> None:
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        result = func(*args, **(kwargs or {}))
        if name in _VIEWS or name in _ON_HOST:
            return result
        if name == "copy_":
            self._work.copies += 1
        elif "empty" not in name:
            self._work.operations.append(name)
        self._work.allocations += not name.endswith("_")
        return result


class Streams:
    """Which launches come behind which others, by what forks and joins; all by name."""

    def __init__(self, launches: list[Launch]) -> None:
        self.launches, self._seen = launches, 0
        self._current = set[str]()  # what the next launch comes behind
        self.behind: dict[str, frozenset[str]] = {}  # of each launch, those before it
        self.num_forks = 0
        self.label = ""  # in front of the names of kernels from now on

    def run(self, name: str) -> None:
        """The engine launches something in the current stream."""
        self.note_kernels()
        self._note(name)

    def note_kernels(self) -> None:
        """Those launched until now were for the current stream."""
        for launch in self.launches[self._seen :]:
            self._note(launch.function.__name__)
        self._seen = len(self.launches)

    def side_stream(self, _device: torch.device) -> "_Side":
        """Instead of the one that a micro-batch makes."""
        return _Side(self)

    def _note(self, name: str) -> None:
        self.behind[f"{self.label}{name}"] = frozenset(self._current)
        self._current.add(f"{self.label}{name}")


class _Side:
    """``SideStream`` whose launches are only recorded."""

    stream = None

    def __init__(self, streams: Streams) -> None:
        self._streams, self._behind, self._engine = streams, set[str](), set[str]()
        self._has_forked = False

    def __enter__(self) -> None:
        streams = self._streams
        streams.note_kernels()
        streams.num_forks += 1
        self._engine, self._has_forked = streams._current, True
        self._behind |= self._engine
        streams._current = self._behind

    def __exit__(self, *_: object) -> None:
        self._streams.note_kernels()
        self._streams._current = self._engine

    def join(self) -> None:
        self._streams.note_kernels()
        if self._has_forked:
            self._has_forked = False
            self._streams._current |= self._behind


@contextmanager
def recorded_streams() -> Iterator[Streams]:
    """Inside, launches are recorded instead of made, as are streams of balancers made inside."""
    with recorded_launches() as launches:
        streams = Streams(launches)
        with mock.patch.object(micro_batch, "SideStream", streams.side_stream):
            yield streams


def recorded_balancer(
    recorder: FakeRecorder,
    shape: ExpertShape = SHAPE,
    layers: int = LAYERS,
    slot_memory: str = "shared",
) -> DeviceBalancer:
    """Rank 0 of a group; use it inside ``recorded_launches`` only."""
    masters = [[torch.ones((shape.num_masters, 64))] for _ in range(layers)]
    rows = torch.zeros((shape.num_ranks, row_width(shape.num_logical_experts, TokenView.OWN)))
    setup = GroupSetup(
        bare_config(SMALL, 1.02, slot_memory),
        shape,
        TokenView.OWN,
        Location.on_one_host(0, shape.num_ranks),
        chunk_bytes=1 << 12,
    )
    given = HostDriver(), setup, masters, rows.int(), recorder, 1, Programs(1, 0)
    return mirrored_balancer(*given)[0]


def count_layers(
    kind: str, batches: int = 4, lag: int = 1, decoded: int = 0, slot_memory: str = "shared"
) -> list[HostWork]:
    """The work of every layer of the last of ``batches`` alike; ``kind`` is one of ``KINDS``.

    The device is so many batches behind, as it may be under an engine that schedules ahead; before
    each so many of decode are ``decoded``.
    """
    recorder = FakeRecorder(policy=Policy.OFF if kind == "off" else Policy.QUOTA)
    ids = torch.zeros((TOKENS, TOP_K), dtype=torch.int32)
    tokens = SMALL - 1 if kind == "decode" else TOKENS
    with recorded_streams() as streams, _lagging(lag):
        balancer = recorded_balancer(recorder, slot_memory=slot_memory)
        if kind in _SAID:  # as the device and the host have found the batches before
            let_device_say(balancer, _SAID[kind])
        for _ in range(batches):
            for layer in [*range(LAYERS)] * decoded:
                balancer.route(layer, ids, SMALL - 1)
                balancer.receive()
                balancer.computed()
            found = list[HostWork]()
            for layer in range(LAYERS):
                found.append(work := HostWork())
                already, forks = len(streams.launches), streams.num_forks
                with _counted_events(work), _Operations(work):
                    balancer.route(layer, ids, tokens)
                    balancer.receive()
                    balancer.experts_done()
                    balancer.computed()
                work.kernels = [launch.function.__name__ for launch in streams.launches[already:]]
                work.events += 2 * (streams.num_forks - forks)  # where a stream forks and joins
    return found


@contextmanager
def _lagging(batches: int) -> Iterator[None]:
    """Inside, the last ``batches`` that were sent to the host are not there yet."""
    send, sent = Page.send, list[Page]()

    def sending(page: Page) -> None:
        send(page)
        sent.append(page)

    def is_done(page: Page) -> bool:
        return all(page is not late for late in sent[len(sent) - batches :])

    with (
        mock.patch.object(Page, "send", sending),
        mock.patch.object(Page, "is_done", property(is_done)),
    ):
        yield


def let_device_say(balancer: DeviceBalancer, decision: Decision) -> None:
    """Of every layer of the batches that come, whose slots get nothing."""
    _, ranks, slots = balancer._sizes
    for page in balancer._batches._pages:
        page._on_device[:, 0] = decision
        page._on_device[:, -2 * ranks * slots :] = -1


def host_microseconds_per_layer() -> dict[str, float]:
    """Of layers between a batch's first and last, and of ``all`` with records, slots full.

    The driver is a function of C that does nothing, of which a launch is one call. Where torch sees
    a GPU, memory for ids, streams and events are asked of it.
    """
    recorder, shape = FakeRecorder(), ExpertShape(64, 256, 2)
    device, found = torch.device("cuda" if torch.cuda.is_available() else "cpu"), dict[str, float]()
    ids = torch.zeros((TOKENS, TOP_K), dtype=torch.int32, device=device)
    nothing = ctypes.CDLL(None).pthread_equal  # of a configuration and 0
    with (
        TemporaryDirectory(dir=SHARED_MEMORY) as folder,
        closing(create(Path(folder), shape=shape, ring_records=RING_RECORDS)) as ring,
        prepared_launches(nothing),
        _one_thread(),
        mock.patch.object(recorder, "record_batch", ring.record_batch),
        mock.patch.object(pages, "new_mark", side_effect=lambda _: timing.new_mark(device)),
        mock.patch.object(micro_batch, "SideStream", side_effect=lambda _: SideStream(device)),
    ):
        balancer = recorded_balancer(recorder, shape, MANY)
        for kind in ("balanced", "left_alone", "decode"):
            tokens = SMALL - 1 if kind == "decode" else TOKENS
            if kind == "left_alone":
                let_device_say(balancer, Decision.BALANCED)
            of_batches = []
            for _ in range(20):
                of_layers = []
                for layer in range(MANY):
                    began = time.perf_counter()
                    balancer.route(layer, ids, tokens)
                    balancer.receive()
                    balancer.experts_done()
                    balancer.computed()
                    of_layers.append(1e6 * (time.perf_counter() - began))
                of_batches.append(of_layers)
            found[kind] = statistics.median([each for took in of_batches for each in took[1:-1]])
            found[f"{kind}, all"] = statistics.median(map(statistics.mean, of_batches))
    times = timeit.repeat(lambda: nothing(None, None, None, None), number=1, repeat=1000)
    return found | {"launch": 1e6 * statistics.median(times)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch has no threads that wait for each other: copies are a device's."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


@contextmanager
def prepared_launches(
    launched: Callable[..., int], scratch: int = 0
) -> Iterator[list[tuple[int, list[int]]]]:
    """Inside, Triton only yields grids and words; ``launched`` is called for the driver.

    Its kernels take ``scratch`` bytes of memory that it adds.
    """
    asked: list[tuple[int, list[int]]] = []

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        num_warps, _ = kwargs.pop("num_warps", 4), kwargs.pop("maxnreg", None)
        arguments = dict(zip(function.arg_names, args, strict=False)) | kwargs
        made = bound(function, arguments)
        words = [*made.words(), 0, 0]
        asked.append((*grid, words))
        return SimpleNamespace(
            function=0,
            metadata=SimpleNamespace(
                num_warps=num_warps, shared=0, global_scratch_size=0, profile_scratch_size=scratch
            ),
            src=SimpleNamespace(signature={name: made.signature[name] for name in made.values}),
            asm={"ptx": f".visible .entry kernel({'.param ' * len(words)})"},
        )

    device = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    with (
        mock.patch.object(triton.JITFunction, "run", run),
        mock.patch.object(launch_module, "driver", SimpleNamespace(active=device)),
        mock.patch.object(launch_module, "_launch_kernel", return_value=launched),
    ):
        yield asked


def _counted_events(work: HostWork) -> Any:
    record: Callable[[Any], None] = timing._HostMark.record

    def recorded(mark: Any) -> None:
        work.events += 1
        record(mark)

    def waited(_waits_for: Any) -> None:
        work.waits += 1

    stack = ExitStack()
    marks = mock.patch.multiple(timing._HostMark, record=recorded, synchronize=waited)
    stack.enter_context(marks)
    stack.enter_context(mock.patch.object(DeviceFabric, "require_peers", waited))
    return stack
