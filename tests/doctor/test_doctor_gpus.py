"""GPUs and their links, as a made-up nvidia-smi tells."""

import pytest

from tests.support.findings import only, versions
from ultraep_serve.doctor.finding import Status
from ultraep_serve.doctor.gpus import check_gpus, link_domains

TWO_PAIRS = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV4\tSYS\tSYS\tNODE\t0-31\t0
GPU1\tNV4\t X \tSYS\tSYS\tNODE\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tNV4\t X \tSYS\t32-63\t1
NIC0\tNODE\tNODE\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_domains_are_joined_by_nvlink_alone() -> None:
    assert link_domains(TWO_PAIRS) == [[0, 1], [2, 3]]
    ring = "GPU0 X NV2 PIX NV2\nGPU1 NV2 X NV2 PIX\nGPU2 PIX NV2 X NV2\nGPU3 NV2 PIX NV2 X\n"
    assert link_domains(ring) == [[0, 1, 2, 3]]
    assert link_domains("GPU0 X PHB\nGPU1 PHB X\n") == [[0], [1]]
    assert link_domains("") == []


def test_gpus_are_named_and_said_to_be_unproven() -> None:
    answers = {"--query-gpu=name,memory.total": "A, 80 MiB\n" * 4, "topo": TWO_PAIRS}
    gpus, links, _ = check_gpus(lambda arguments: answers[arguments[0]])
    assert gpus.status is Status.WARNING
    assert "4 x A, 80 MiB; the parts of balancing ran on one, but no engine did" in gpus.seen
    assert links.status is Status.OK  # whether ranks fit is another check's question
    assert "2 NVLink domains of GPUs: 0,1; 2,3" in links.seen


def test_no_gpu_is_no_problem() -> None:
    assert only(check_gpus(lambda _: None)).status is Status.OK
    assert only(check_gpus(lambda _: "")).status is Status.OK


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        ({}, Status.WARNING, "cuda-bindings is missing"),
        (versions(cuda_bindings="13.0.1"), Status.OK, "cuda-bindings 13.0.1"),
    ],
)
def test_gpus_need_bindings(installed: dict[str, str], status: Status, words: str) -> None:
    answers = {"--query-gpu=name,memory.total": "A, 80 MiB\n", "topo": None}
    _, _, bindings = check_gpus(lambda arguments: answers[arguments[0]], installed.get)
    assert (bindings.status, words in bindings.seen) == (status, True)
    assert ("ultraep-serve[cuda]" in bindings.remedy) == (status is Status.WARNING)


def test_one_gpu_has_no_links() -> None:
    answers = {"--query-gpu=name,memory.total": "A, 80 MiB\n", "topo": None}
    assert check_gpus(lambda arguments: answers[arguments[0]])[1].status is Status.OK
