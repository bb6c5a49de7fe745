"""Where ranks stand: hosts that are found, domains that are made of them, what is refused."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.hosts import engine_group, host_path, meet_in
from tests.support.ranks import outcomes_of_ranks, run_ranks
from tests.support.ring_files import create
from ultraep_serve.balance import agreement
from ultraep_serve.balance.agreement import find_location
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system.topology import Location, locate
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.ring import RingState


def test_a_host_is_a_domain_unless_it_is_divided() -> None:
    hosts = [7, 7, 7, 7, 3, 3, 3, 3]
    whole = locate(5, hosts, 0)
    assert (whole.host, whole.domain, whole.num_domains) == (range(4, 8), range(4, 8), 2)
    half = locate(5, hosts, 2, "first")
    assert (half.host, half.domain, half.num_domains) == (range(4, 8), range(4, 6), 4)
    assert half.first_host == "first"
    assert [locate(rank, hosts, 2).is_host_primary for rank in range(8)] == [
        rank in (0, 4) for rank in range(8)
    ]
    assert Location.on_one_host(1, 3).domain == range(3)
    both = locate(5, hosts, 8)
    assert (both.host, both.domain, both.num_domains) == (range(4, 8), range(8), 1)
    assert (whole.spans_hosts, half.spans_hosts, both.spans_hosts) == (False, False, True)
    assert locate(5, [*hosts, 1, 1, 1, 1, 2, 2, 2, 2], 8).num_domains == 2


@pytest.mark.parametrize(
    ("hosts", "domain_size", "message"),
    [
        ([1, 2, 1, 2], 0, "do not follow each other"),
        ([1, 2, 2, 1], 0, "do not follow each other"),
        ([1, 1, 2], 0, r"hosts hold \[2, 1\] ranks"),
        ([1, 1, 1, 1], 3, "--domain-size 3 does not divide the 4 ranks of a host"),
        ([1, 1, 2, 2, 3, 3], 4, "choose a divisor of 2, or 0"),
        ([1, 1, 2, 2], 3, "nor make equal groups of the 2 hosts"),
        ([1, 1, 2, 2], 8, "nor make equal groups of the 2 hosts"),
    ],
)
def test_what_forms_no_domains_is_refused_with_the_remedy(
    hosts: list[int], domain_size: int, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message) as refusal:
        locate(0, hosts, domain_size)
    assert "set on_unsupported to off" in str(refusal.value)


def find(rank: int, run_path: Path, host_size: int, config: BalanceConfig) -> Location:
    played = Location(rank, 4, host_size, host_size)
    meet_in(host_path(run_path, played))
    if rank == 2:
        config = config.replace(domain_size=config.slots)
    return find_location(config, rank, engine_group(run_path, rank, 4))


def find_with_another_version(rank: int, run_path: Path, config: BalanceConfig) -> Location:
    if rank == 3:  # of a process of its own
        vars(agreement)["__version__"] = "another"
    return find(rank, run_path, 2, config)


@pytest.mark.parametrize("host_size", [1, 2, 4])
def test_ranks_find_their_hosts(run_path: Path, host_size: int) -> None:
    config = BalanceConfig(slots=0)
    found = run_ranks(find, 4, run_path, host_size, config)
    firsts = [rank // host_size * host_size for rank in range(4)]
    assert [found[rank].host for rank in range(4)] == [range(f, f + host_size) for f in firsts]
    assert len({location.first_host for location in found}) == 1
    assert found[0].first_host
    assert [location.rank for location in found] == list(range(4))


def test_hosts_that_were_started_with_other_flags_are_told_which(run_path: Path) -> None:
    outcomes = outcomes_of_ranks(find, 4, run_path, 2, BalanceConfig())
    assert {outcome.error for outcome in outcomes} == {"ConfigError"}
    message = "rank 2 was started with another domain_size than rank 0"
    assert all(message in outcome.message for outcome in outcomes)


def test_hosts_with_different_versions_are_told_so(run_path: Path) -> None:
    """Before anything is compared that another version may not have."""
    outcomes = outcomes_of_ranks(find_with_another_version, 4, run_path, BalanceConfig())
    assert {outcome.error for outcome in outcomes} == {"ConfigError"}
    message = "rank 3 runs another version of ultraep_serve than rank 0"
    assert all(message in outcome.message for outcome in outcomes)
    assert "rank 3 runs another)" in outcomes[3].message


@pytest.mark.parametrize("mounted", ["none", "another"])
def test_without_proc_nobody_is_taken_for_dead(
    mounted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose processes are alive is not known there; heartbeats are."""
    (tmp_path / "another").symlink_to("/proc/1")
    monkeypatch.setattr("ultraep_serve.system.topology._SELF", tmp_path / mounted)
    with closing(create(tmp_path)) as recorder, closing(RingReader(tmp_path / "ring-0")) as reader:
        recorder.set_state(RingState.READY)
        header = reader.header()
        assert header.process_namespace == 0
        assert not replace(header, pid=2**22 + 1).dead
        assert header.alive(header.heartbeat_ns + 1)
