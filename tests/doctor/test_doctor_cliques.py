"""NVLink between hosts, in the words of nvidia-smi's fabric fields (made up, none recorded)."""

import pytest

from tests.support.findings import only
from ultraep_serve.doctor.finding import Status
from ultraep_serve.doctor.gpus import check_cliques

RACK = "6f1d0e5a-0000-4c1e-9a53-3f0f6c0de001"


@pytest.mark.parametrize(
    "answer",
    [
        None,  # no GPU, or a driver that does not know the fields
        "",
        "Completed, 00000000-0000-0000-0000-000000000000, 0\n" * 8,  # NVSwitch within one host
        "[N/A], [N/A], [N/A]\n",
        "[Not Supported]\n",
    ],
)
def test_hosts_that_nvlink_does_not_join_have_no_clique(answer: str | None) -> None:
    assert check_cliques(lambda _: answer) == []


def test_the_clique_is_named_as_nodes_are_labelled() -> None:
    finding = only(check_cliques(lambda _: f"Completed, {RACK}, 32766\n" * 4))
    assert finding.status is Status.OK
    assert finding.figures == {"cliques": [f"{RACK}.32766"]}
    assert "nvidia.com/gpu.clique" in finding.seen


def test_gpus_of_two_cliques_are_a_warning() -> None:
    both = f"Completed, {RACK}, 1\nCompleted, {RACK}, 2\n"
    finding = only(check_cliques(lambda _: both))
    assert finding.status is Status.WARNING
    assert finding.figures["cliques"] == [f"{RACK}.1", f"{RACK}.2"]


def test_a_fabric_that_is_not_ready_is_a_warning() -> None:
    finding = only(check_cliques(lambda _: f"In Progress, {RACK}, 0\n" * 4))
    assert finding.status is Status.WARNING
    assert "In Progress" in finding.seen
