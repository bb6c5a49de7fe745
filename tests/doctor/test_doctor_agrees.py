"""The doctor and the launcher of the same command line: what one refuses is the other's error."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ultraep_lab.this_machine import free_port
from ultraep_serve.cli import main
from ultraep_serve.config import SIDECAR_DISTANCE

MOE, FP8 = {"num_experts": 16}, {"quant_method": "fp8"}
# What is to be served: names in capital letters are local, org/model is not here. PORT is free,
# TAKEN is another program's, and the sidecar's of a server on NEXT.
GOOD = [
    "vllm MODEL -tp 2 -ep --port PORT",
    "vllm MODEL --tensor-parallel-size=4 --enable-expert-parallel --port PORT",
    "vllm org/model -tp 2 -ep --port PORT",
    "vllm MODEL -dp 2 -ep --port PORT",
    "vllm MODEL -dp 8 -dpl 2 -ep --port PORT",
    "vllm MODEL -dp 8 -dpl 2 -dpr 2 -ep --headless --port TAKEN",
    "vllm MODEL -tp 2 -pp 2 -ep --port PORT",
    "vllm MODEL --tensor_parallel_size=2 --enable_expert_parallel --port PORT",
    "vllm --model MODEL --config YAML --port PORT",
    "sglang --model-path MODEL --config SGLANG --device cpu --port PORT",
    "vllm MODEL -tp 2 -ep --port PORT --sidecar-port 0",
    "vllm MODEL -tp 2 -ep --port NEXT --no-sidecar",
    "vllm MODEL -tp 2 -ep --port NEXT --policy off",
    "vllm MODEL --port PORT --policy off",
    "vllm DENSE -tp 2 --port PORT --policy off",
    "vllm MODEL -tp 2 --enable-eplb -ep --port PORT --policy off",
    "vllm MODEL -tp 2 -ep --expert-placement-strategy linear --no-enable-lora --port PORT",
    "vllm PARTLY -tp 2 -ep --port PORT",
    "vllm QUANTISED -tp 2 --port PORT --policy off",
    "sglang MODEL --tp 2 --ep 2 --enable-lora --on-unsupported off --device cpu --port PORT",
    "vllm MODEL -tp 2 -ep --port PORT --slots 4 --speeds 1.0,0.6",
    "sglang MODEL --tp 2 --ep 2 --device cpu --port PORT",
    "sglang MODEL --tp-size 4 --ep-size 4 --nnodes 2 --device cpu --port PORT",
]
BAD = [  # and words that both say
    ("vllm MODEL -tp 2 --port PORT", "without --enable-expert-parallel"),
    ("vllm MODEL -ep --port PORT", "nothing to balance on one rank"),
    ("vllm MODEL -tp 2 -ep --enable-eplb --port PORT", "--enable-eplb moves the same weights"),
    ("vllm MODEL -tp 2 -dp 2 -ep --policy off --port PORT", "tensor and data parallelism together"),
    ("vllm MODEL -tp 3 -ep --port PORT", "16 experts do not divide evenly over 3 ranks"),
    ("sglang MODEL --tp 3 --ep 3 --device cpu", "16 experts do not divide evenly over 3 ranks"),
    ("vllm DENSE -tp 2 -ep --port PORT", "is not a Mixture-of-Experts model"),
    ("vllm BROKEN -tp 2 -ep --port PORT", "mend it or fetch the model again"),
    ("vllm ./nowhere -tp 2 -ep --port PORT", "./nowhere does not exist; name a directory"),
    ("sglang /nowhere --policy off --device cpu --port PORT", "/nowhere does not exist; name a"),
    ("vllm MODEL -tp 2 -ep --enable-lora --port PORT", "; drop --enable-lora"),
    ("vllm MODEL -tp 2 -ep --enable_lora --policy off --port PORT", "; drop --enable-lora"),
    ("sglang MODEL --tp 2 --ep 2 --enable-lora --device cpu", "; drop --enable-lora"),
    ("sglang MODEL --tp 2 --ep 2 --lora-paths a b --device cpu", " and --lora-paths"),
    ("vllm MODEL -tp 2 -ep --quantization fp8 --port PORT", "AMX; drop --quantization fp8"),
    ("vllm MODEL -tp 2 -ep -q fp8 --policy off --port PORT", "AMX; drop --quantization fp8"),
    ("sglang MODEL --tp 2 --ep 2 --quantization fp8 --device cpu", "; drop --quantization fp8"),
    ("vllm QUANTISED -tp 2 -ep --port PORT", "AMX; use an unquantised checkpoint"),
    ("sglang QUANTISED --tp 2 --ep 2 --device cpu", "; use an unquantised checkpoint"),
    (
        "vllm MODEL -tp 2 -ep --expert-placement-strategy round_robin --port PORT",
        "use --expert-placement-strategy linear",
    ),
    ("sglang MODEL --tp 2 --ep 2 --pp-size 2 --device cpu", "use --pp-size 1"),
    ("sglang MODEL --tp 4 --moe-a2a-backend deepep --device cpu", "--moe-a2a-backend must be none"),
    ("sglang MODEL --tp 2 --ep 2 --dp-size 2 --device cpu", "every replica balances apart"),
    (
        "sglang MODEL --tp 2 --ep 2 --dp 2 --enable-dp-attention --device cpu",
        "on CPU; use --tp",
    ),
    ("vllm MODEL -dp 2 -dpl 2 -ep --data-parallel-multi-port-external-lb", "a port of its own"),
    ("vllm MODEL -tp 2 -ep --port TAKEN", "cannot be used (Address already in use by process"),
    ("vllm MODEL -tp 2 -ep --port NEXT", "choose another --sidecar-port"),
    ("vllm MODEL -tp 2 -ep --port PORT --sidecar-port TAKEN", "choose another --sidecar-port"),
    ("vllm MODEL -tp 2 -ep --port PORT --sidecar-host 192.0.2.1", "192.0.2.1:"),
    ("vllm MODEL -tp 2 -ep --port PORT --sidecar-host 2001:db8::1", "[2001:db8::1]:"),
    ("vllm MODEL -tp 2 -ep --port PORT --slots 99", "--slots = 99 must be 0 to 64"),
    ("vllm MODEL -tp 2 -ep --port PORT --policy best", "must be 'off', 'quota' or 'ideal'"),
    ("vllm MODEL -tp 2 -ep --port PORT --policy ideal", "add --allow-ideal"),
    ("vllm MODEL -tp two -ep --port PORT", "invalid int value: 'two'"),
    ("vllm MODEL -tp 2 -ep --no-such-flag", "unrecognized arguments: --no-such-flag"),
    ("vllm MODEL --config YAML --enable-eplb --port PORT", "--enable-eplb moves the same weights"),
    ("vllm -tp 2 -ep --port PORT", "name a model: ultraep-serve vllm MODEL"),
    ("vllm -tp 2 -ep MODEL --port PORT", "follows flags; name the model first"),
    ("sglang --tp-size 2 --ep-size 2", "arguments are required: --model-path"),
    ("sglang MODEL --tp-size -2 --ep-size -2 --device cpu", "must be 1 or more"),
    ("vllm MODEL -tp -2 -dp -1 -ep --port PORT", "must be 1 or more"),
    ("vllm MODEL -dp 2 -dpl 3 -ep --port PORT", "3 of 2 ranks cannot be on this host"),
    ("vllm MODEL -dp 2 -dpl -1 -ep --port PORT", "-1 of 2 ranks cannot be on this host"),
    ("vllm MODEL -tp 2 -ep --nnodes 4 --port PORT", "2 ranks do not divide evenly over --nnodes 4"),
    ("sglang MODEL --tp 2 --ep 2 --nnodes 4 --device cpu", "do not divide evenly over --nnodes 4"),
    ("vllm MODEL -tp 2 -ep --max-num-batched-tokens 128 --port PORT", "--min-batch-tokens 128 or"),
    (
        "sglang MODEL --tp 2 --ep 2 --chunked-prefill-size 128 --device cpu --port PORT",
        "choose --min-batch-tokens 128 or less",
    ),
    ("vllm MODEL -tp 2 -ep --port PORT --sidecar-port PORT", "choose another --sidecar-port"),
    ("vllm MODEL -tp 2 -ep --port 65000", "beside a server on port 65000 the sidecar has none"),
    ("vllm MODEL -tp 2 -ep --port PORT --host nosuch.invalid", "choose another --host"),
    ("vllm MODEL -tp 2 -ep --port PORT --sidecar-host nosuch.x", "choose another --sidecar-host"),
    ("vllm MODEL -pp 2 -ep --port PORT", "--tensor-parallel-size 2 or --data-parallel-size 2"),
    ("sglang MODEL --device cpu --port PORT", "add --tp-size 2 --ep-size 2"),
    ("sglang MODEL --tp 2 --ep 2 --enable-waterfill --device cpu", "--enable-waterfill"),
    ("sglang MODEL --tp 2 --device cpu --port PORT", "--ep-size 1 below --tp-size 2"),
    ("sglang MODEL --tp 2 --ep 2 --enable-eplb --device cpu", "--enable-eplb moves"),
    ("sglang MODEL --tp 2 --ep 2 --ep-dispatch-algorithm lp --device cpu", "(LPLB) splits"),
]


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    configs = {
        "MODEL": json.dumps(MOE),
        "DENSE": json.dumps({"architectures": ["LlamaForCausalLM"]}),
        "BROKEN": "{",
        "QUANTISED": json.dumps({"text_config": {**MOE, "quantization_config": FP8}}),
        "PARTLY": json.dumps({**MOE, "quantization_config": {**FP8, "ignore": ["re:.*experts"]}}),
    }
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    flags = {"YAML": "tensor-parallel-size: 2\nenable-expert-parallel: true\n",
             "SGLANG": "tp-size: 2\nep-size: 2\n"}  # fmt: skip
    for name, text in flags.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    files = {name: str(tmp_path / f"{name}.yaml") for name in flags}
    return files | {name: str(tmp_path / name) for name in configs}


@contextmanager
def ports() -> Iterator[dict[str, str]]:
    """A free port, one of another program's, and one whose sidecar's is that."""
    taken = free_port()
    with socket.create_server(("0.0.0.0", taken)):
        names = {"PORT": free_port(), "TAKEN": taken, "NEXT": taken - SIDECAR_DISTANCE}
        yield {name: str(port) for name, port in names.items()}


def both(command: str, models: dict[str, str], capsys: Any) -> tuple[int, str, int, str]:
    """Exit code and errors of the doctor, exit code and message of the launcher."""
    with ports() as names:
        words = [{**models, **names}.get(word, word) for word in command.split()]
        code = main(["doctor", "--json", *words])
        told = capsys.readouterr()
        findings = json.loads(told.out)["findings"] if told.out else []
        errors = [f"{f['seen']}; {f['remedy']}" for f in findings if f["status"] == "error"]
        try:
            started = main(words)
        except SystemExit as becomes:
            started = int(becomes.code or 0)
        return code, "\n".join(errors) or told.err, started, capsys.readouterr().err


@pytest.fixture(autouse=True)
def _nothing_starts(installed: None, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(*_: object) -> NoReturn:
        raise SystemExit(0)

    monkeypatch.setattr("os.execve", execute)


def test_it_is_shown_in_text_and_json(models: dict[str, str], capsys: Any) -> None:
    words = ["vllm", models["MODEL"], "-tp", "3", "-ep", "--port", str(free_port())]
    assert main(["doctor", *words]) == 1
    shown = capsys.readouterr().out
    assert "✘ flags         16 experts do not divide" in shown
    assert "→ choose a number of ranks" in shown
    assert main(["doctor", "--json", *words]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["counts"]["error"] == 1
    assert all(f.keys() == {"name", "status", "seen", "remedy"} for f in document["findings"])
    assert main(["doctor", "--port", "0"]) == 2


@pytest.mark.parametrize("command", GOOD)
def test_what_starts_has_no_error(command: str, models: dict[str, str], capsys: Any) -> None:
    code, errors, started, message = both(command, models, capsys)
    assert (code, errors, started) == (0, "", 0), message


@pytest.mark.parametrize(("command", "words"), BAD)
def test_what_is_refused_is_an_error_of_the_same_words(
    command: str, words: str, models: dict[str, str], capsys: Any
) -> None:
    code, errors, started, message = both(command, models, capsys)
    assert words in errors
    assert words in message
    assert (code > 0, started) == (True, 2)
