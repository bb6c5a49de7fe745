"""What engines record by themselves becomes a trace: vLLM's answers, SGLang's dumps."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ultraep_lab.engine_recordings import from_sglang, from_vllm
from ultraep_lab.errors import TraceError
from ultraep_lab.store import load_trace
from ultraep_lab.trace import DECODE, PREFILL, LoadTrace, Trace
from ultraep_serve.cli import execute
from ultraep_serve.errors import ConfigError

torch = pytest.importorskip("torch")
LAYERS, TOP_K, EXPERTS = 3, 2, 8  # layer 0 has no router
IDS = np.random.default_rng(0).permuted(np.tile(np.arange(EXPERTS), (64, LAYERS, 1)), axis=2)
IDS = IDS[:, :, :TOP_K].astype(np.uint8)
IDS[:, 0] = 0
MAP = np.stack([np.roll(np.arange(EXPERTS + 2) % EXPERTS, layer) for layer in range(LAYERS)])


def encoded(ids: np.ndarray) -> str:
    """As vLLM encodes them."""
    stream = io.BytesIO()
    np.save(stream, ids)
    return base64.b64encode(stream.getvalue()).decode()


def response(ids: np.ndarray, generated: float) -> dict[str, Any]:
    """What a completion of ``generated`` tokens answers."""
    choice = {"index": 0, "text": "x", "routed_experts": encoded(ids)}
    return {"choices": [choice], "usage": {"completion_tokens": generated}}


def as_one(responses: list[Any]) -> str:
    return json.dumps(responses)


def as_lines(responses: list[Any]) -> str:
    return "\n".join(json.dumps(each) for each in responses)


@pytest.mark.parametrize("written", [as_one, as_lines])
def test_answers_of_vllm(tmp_path: Path, written: Callable[[list[Any]], str], capsys: Any) -> None:
    """Prompts of 20 and 30 tokens; the second generates 5, of which the last has no routing."""
    file, out = tmp_path / "answers.json", tmp_path / "t.npz"
    file.write_text(written([response(IDS[:20], 1), response(IDS[20:54], 5)]))
    execute(["record", "--from-vllm", str(file), "--experts", "16", "--out", str(out)])
    assert "54 tokens, 4 of them decode, in 2 sequences, 2 MoE layers" in capsys.readouterr().out
    trace = load_trace(out)
    assert isinstance(trace, Trace)
    assert np.array_equal(trace.topk_ids, IDS[:54, 1:])
    assert trace.sequence_lengths.tolist() == [20, 34]
    assert trace.phase is not None
    assert trace.phase.tolist() == [PREFILL] * 50 + [DECODE] * 4
    assert (trace.num_experts, trace.metadata["engine"]) == (16, "vllm")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("3", "no whole response"),
        ('{"choices": [], "usage": {"completion_tokens": 1}}', "one choice"),
        (json.dumps(response(IDS, 1) | {"usage": None}), "no whole response"),
        (json.dumps(response(IDS[0], 1)), "must be integers with 3 dimensions"),
        (json.dumps(response(IDS / 2, 1)), "is float64"),
        (json.dumps(response(IDS.astype(int) + (1 << 32), 1)), f"has {(1 << 32) + 7}"),
        *((json.dumps(response(IDS, n)), "must be a whole number") for n in (1.9, True, -5, 65)),
        (json.dumps(response(IDS[:, :1], 1)), "no token was routed"),
        (
            json.dumps(response(IDS, 1)).replace('routed_experts": "', 'routed_experts": "!'),
            "decoded",
        ),
        (as_lines([response(IDS, 1), response(IDS[:, 1:], 1)]), "different models"),
        ("[]", "send requests"),
        (
            '{"choices": [{"routed_experts": null}], "usage": {"completion_tokens": 1}}',
            "enable-return-routed-experts",
        ),
    ],
)
def test_what_is_no_answer(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "answers.json").write_text(text)
    with pytest.raises(TraceError, match=words):
        from_vllm([tmp_path / "answers.json"])


def test_an_expert_beyond_the_last_is_not_another(tmp_path: Path) -> None:
    """383 is 127 in the eight bits in which ids of 256 experts are saved."""
    (tmp_path / "answers.json").write_text(json.dumps(response(IDS.astype(int) + 376, 1)))
    with pytest.raises(TraceError, match=r"answers.json: routed_experts has 383, .* -1 to 255"):
        from_vllm([tmp_path / "answers.json"], 256)


@pytest.mark.engine  # imports one
def test_vllms_own_writer(tmp_path: Path) -> None:
    serial = pytest.importorskip("vllm.utils.serial_utils", reason="writes with vLLM's own code")
    protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    choice = protocol.CompletionResponseChoice(
        index=0, text="", routed_experts=serial.numpy2base64(IDS[:12])
    )
    usage = protocol.UsageInfo(prompt_tokens=10, completion_tokens=3)
    made = protocol.CompletionResponse(model="m", choices=[choice], usage=usage)
    (tmp_path / "answers.json").write_text(made.model_dump_json())
    trace = from_vllm([tmp_path / "answers.json"])
    assert np.array_equal(trace.topk_ids, IDS[:12, 1:])
    assert trace.phase is not None
    assert trace.phase.tolist() == [PREFILL] * 10 + [DECODE] * 2


def record(number: int, rank: int, tokens: slice, mode: int = 1) -> dict[str, Any]:
    """A forward pass as SGLang's detailed recorder keeps it, experts in places of their own."""
    ids = IDS[tokens].astype(np.int32)
    physical = np.full((LAYERS, len(ids), 8), -1, np.int32)
    for layer in range(1, LAYERS):
        physical[layer, :, :TOP_K] = np.argsort(MAP[layer], kind="stable")[
            np.searchsorted(np.sort(MAP[layer]), ids[:, layer])
        ]
    return {
        "forward_pass_id": number,
        "rank": rank,
        "forward_mode": mode,
        "input_ids": list(range(tokens.start, tokens.stop)),
        "topk_ids_of_layer": torch.tensor(physical),
    }


def dumped(path: Path, *records: dict[str, Any]) -> Path:
    torch.save({"records": list(records), "last_physical_to_logical_map": torch.tensor(MAP)}, path)
    return path


def test_sglangs_tokens_of_two_ranks(tmp_path: Path, capsys: Any) -> None:
    first = dumped(tmp_path / "0.pt", record(7, 0, slice(0, 9)), record(8, 0, slice(9, 10), 2))
    second = dumped(tmp_path / "1.pt", record(7, 1, slice(20, 24)), record(8, 1, slice(9, 10), 2))
    out = tmp_path / "t.npz"
    execute(["record", "--from-sglang", str(second), str(first), "--out", str(out)])
    assert "14 tokens, 1 of them decode, in 2 batches, 2 MoE layers" in capsys.readouterr().out
    trace = load_trace(out)
    assert isinstance(trace, Trace)
    assert np.array_equal(trace.topk_ids, IDS[[*range(9), *range(20, 24), 9], 1:])
    assert trace.sequence_lengths.tolist() == [13, 1]  # both ranks saw the token of pass 8
    assert trace.num_experts == EXPERTS


def test_sglangs_counts(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(1, 9, (4, LAYERS, EXPERTS)).astype(np.int32)
    counts[:, 0] = 0
    counts[2] = 0  # of the buffer, not used yet
    for number in (0, 1):
        torch.save({"rank": 0, "logical_count": torch.tensor(counts)}, tmp_path / f"{number}.pt")
    trace = from_sglang([tmp_path / "0.pt", tmp_path / "1.pt"])
    assert isinstance(trace, LoadTrace)
    assert np.array_equal(trace.loads, np.tile(counts[[0, 1, 3], 1:], (2, 1, 1)))
    with pytest.raises(TraceError, match="cannot be joined"):
        from_sglang([tmp_path / "0.pt", dumped(tmp_path / "2.pt", record(0, 0, slice(0, 4)))])


def test_what_is_no_dump(tmp_path: Path) -> None:
    path = tmp_path / "d.pt"
    path.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(TraceError, match="cannot be read"):
        from_sglang([path])
    torch.save({"rank": 0}, path)
    with pytest.raises(TraceError, match="no dump"):
        from_sglang([path])
    torch.save({"records": [{}], "last_physical_to_logical_map": torch.tensor(MAP)}, path)
    with pytest.raises(TraceError, match="forward_mode"):
        from_sglang([path])
    with pytest.raises(TraceError, match="send requests"):
        from_sglang([dumped(path)])
    torch.save({"rank": 0, "logical_count": torch.zeros(2, 2, 2, dtype=torch.int)}, path)
    with pytest.raises(TraceError, match="no token"):
        from_sglang([path])
    with pytest.raises(ConfigError, match="exclude"):
        execute(["record", "--from-vllm", "a", "--from-sglang", "b", "--out", "t.npz"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topk_ids_of_layer": torch.full((LAYERS, 4, 8), -2)}, "topk_ids_of_layer has -2"),
        ({"topk_ids_of_layer": torch.ones(LAYERS, 4, 8)}, "topk_ids_of_layer is float32"),
        ({"forward_mode": "x"}, "forward_mode = 'x'"),
        ({"input_ids": torch.arange(4)}, "not as expected"),
    ],
)
def test_what_is_no_pass(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        from_sglang([dumped(tmp_path / "d.pt", {**record(0, 0, slice(0, 4)), **changes})])


def sglang_passes(module: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of one pass, gathered, accumulated and dumped by SGLang's own classes."""
    wanted = record(3, 0, slice(0, 6))["topk_ids_of_layer"]
    where = SimpleNamespace(
        num_layers=LAYERS,
        num_physical_experts=EXPERTS + 2,
        physical_to_logical_map=torch.tensor(MAP),
    )
    gatherer = object.__new__(module._DetailSinglePassGatherer)
    gatherer._expert_location_metadata, gatherer._metadata = where, None
    gatherer._topk_ids_of_layer = torch.full((LAYERS, 16, 8), -1, dtype=torch.int32)
    gatherer._misc_objects = []
    mode = SimpleNamespace(value=1)
    batch = {"input_ids": torch.arange(6), "positions": torch.arange(6)}
    gatherer.on_forward_pass_start(
        SimpleNamespace(**batch, extend_seq_lens_cpu=[6], forward_mode=mode)
    )
    for layer in range(1, LAYERS):
        gatherer.on_select_experts(layer, wanted[layer, :, :TOP_K])
    kept = object.__new__(module._DetailAccumulator)
    kept._expert_location_metadata, kept._rank, kept._records = where, 0, []
    monkeypatch.setattr(module._UtilizationRateAccumulatorMixin, "append", lambda *_: None)
    kept.append(3, "primary", gatherer.collect(), {})
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(path))
    kept.dump("file")
    (written,) = path.iterdir()
    return written


@pytest.mark.engine  # imports one
def test_sglangs_own_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("sglang.srt.eplb.expert_distribution", reason="SGLang's own code")
    trace = from_sglang([sglang_passes(module, tmp_path / "dumps", monkeypatch)])
    assert isinstance(trace, Trace)
    assert np.array_equal(trace.topk_ids, IDS[:6, 1:])
