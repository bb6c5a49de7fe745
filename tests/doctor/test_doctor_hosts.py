"""Ranks on hosts and in domains, against made-up NVLink topologies."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ultraep_serve.doctor.finding import Status, Subject
from ultraep_serve.doctor.hosts import check_domains, check_hosts


def matrix(*islands: int, order: list[int] | None = None) -> Callable[[list[str]], str]:
    """nvidia-smi where GPUs form NVLink ``islands`` of these sizes, taken in ``order``."""
    names = [island for island, size in enumerate(islands) for _ in range(size)]
    names = [names[gpu] for gpu in order] if order else names
    rows = [
        "\t".join(
            [f"GPU{gpu}"]
            + [
                "X" if gpu == peer else "NV18" if names[gpu] == names[peer] else "SYS"
                for peer in range(len(names))
            ]
        )
        for gpu in range(len(names))
    ]
    return lambda _: "\n".join(rows)


def none(_: list[str]) -> None:
    """nvidia-smi where there is no GPU."""


@pytest.mark.parametrize(
    ("ranks", "here", "hosts", "words"),
    [
        (8, None, 1, "8 ranks here"),
        (16, 8, 2, "16 ranks on 2 hosts, 8 on each"),
        (72, 4, 18, "72 ranks on 18 hosts, 4 on each"),
    ],
)
def test_hosts_are_counted(ranks: int, here: int | None, hosts: int, words: str) -> None:
    finding = check_hosts(Subject(num_ranks=ranks, host_ranks=here))
    assert (finding.status, finding.seen) == (Status.OK, words)
    assert finding.figures == {"ranks": ranks, "ranks_here": here or ranks, "hosts": hosts}


def test_unequal_hosts_are_an_error_that_names_equal_ones() -> None:
    finding = check_hosts(Subject(num_ranks=16, host_ranks=6))
    assert finding.status is Status.ERROR
    assert "6 of them on this host" in finding.seen
    assert finding.remedy.endswith(": 1, 2, 4, 8, 16")


def test_a_domain_that_divides_no_host_is_an_error_that_names_those_that_do() -> None:
    finding = check_domains(Subject(num_ranks=16, host_ranks=8, domain_size=6), none)
    assert finding.status is Status.ERROR
    assert "1, 2, 4, 8; or 0" in finding.remedy


@pytest.mark.parametrize(
    ("size", "seen"), [(0, "2 of 8 ranks each"), (8, "2 of 8 ranks each"), (4, "4 of 4 ranks each")]
)
def test_without_gpus_hosts_and_their_divisors_are_domains(size: int, seen: str) -> None:
    finding = check_domains(Subject(num_ranks=16, host_ranks=8, domain_size=size), none)
    assert (finding.status, finding.seen) == (Status.OK, seen)


def test_a_domain_of_several_hosts_needs_a_channel_between_them(tmp_path: Path) -> None:
    subject = Subject(num_ranks=16, host_ranks=4, domain_size=8)
    refused = check_domains(subject, none, tmp_path / "channels")
    assert (refused.status, "no IMEX channel" in refused.seen) == (Status.ERROR, True)
    assert refused.remedy.endswith("or --domain-size 4")
    (tmp_path / "channel0").touch()
    found = check_domains(subject, none, tmp_path)
    assert found.status is Status.OK
    assert found.seen == "2 of 8 ranks each, on 2 hosts; an IMEX channel is here"
    uneven = check_domains(Subject(num_ranks=16, host_ranks=4, domain_size=12), none, tmp_path)
    assert uneven.status is Status.ERROR


def test_a_host_whose_gpus_nvlink_joins_is_a_domain() -> None:
    finding = check_domains(Subject(num_ranks=8), matrix(8))
    assert finding.status is Status.OK
    assert finding.seen == "one of 8 ranks; NVLink joins all ranks of this host"
    assert finding.figures["fitting_domain_size"] == 8


def test_nvlink_that_ends_inside_a_host_asks_for_smaller_domains() -> None:
    whole = check_domains(Subject(num_ranks=8), matrix(4, 4))
    assert whole.status is Status.WARNING
    assert "ranks 0,1,2,3; 4,5,6,7" in whole.seen
    assert "--domain-size 4" in whole.remedy
    assert whole.figures["nvlink_domains"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    half = check_domains(Subject(num_ranks=8, domain_size=4), matrix(4, 4))
    assert half.status is Status.OK


def test_smaller_domains_than_nvlink_allows_are_mentioned() -> None:
    finding = check_domains(Subject(num_ranks=8, domain_size=2), matrix(8))
    assert (finding.status, "--domain-size 8 would fit too" in finding.seen) == (Status.OK, True)


def test_uneven_islands_leave_what_fits_all_of_them() -> None:
    finding = check_domains(Subject(num_ranks=6), matrix(4, 2))
    assert "--domain-size 2" in finding.remedy  # 3 would put ranks 3, 4 and 5 together


def test_joined_gpus_that_do_not_follow_each_other_are_to_be_ordered() -> None:
    finding = check_domains(Subject(num_ranks=4), matrix(2, 2, order=[0, 2, 1, 3]))
    assert finding.status is Status.WARNING
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy
    assert finding.figures["fitting_domain_size"] == 1


def test_gpus_beyond_the_ranks_do_not_count() -> None:
    finding = check_domains(Subject(num_ranks=2), matrix(2, 2))
    assert finding.figures["nvlink_domains"] == [[0, 1]]
    assert finding.status is Status.OK


def test_fewer_gpus_than_ranks_say_nothing_of_domains() -> None:
    finding = check_domains(Subject(num_ranks=4), matrix(2))
    assert (finding.status, finding.seen) == (Status.OK, "one of 4 ranks")
