"""What `make engine-next` says of a release; nothing is installed and no engine runs."""

from pathlib import Path

import pytest

from tests.engines import check_next
from ultraep_serve.system.versions import SGLANG, VLLM

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="skips"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="fails">
<failure message="AssertionError: moved&#10;at">x</failure></testcase>
</testsuite></testsuites>"""


def test_a_report_of_tests_is_counted_with_reasons(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    counted = check_next.outcome(tmp_path / "report.xml")
    failed = {"tests.b::fails": "AssertionError: moved"}
    assert counted == {"passed": 1, "skipped": 1, "failed": failed}


@pytest.mark.parametrize("folder", [".", "python"])
def test_a_checkout_is_read_where_its_package_is(tmp_path: Path, folder: str) -> None:
    package = tmp_path / folder / "sglang"
    with pytest.raises(check_next.CannotCheckError, match="holds no package sglang"):
        check_next.package_root(tmp_path, "sglang")
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    root = check_next.package_root(tmp_path, "sglang")
    assert root == package.parent
    adapter = check_next.Adapter("sglang")
    (package / "srt").mkdir()
    (package / "srt" / "utils.py").write_text("def is_cpu(): ...\n")
    read = check_next.compare(adapter, root, root)
    assert "sglang.srt.utils.is_cuda" in read["moved"]
    assert "sglang.srt.utils.is_cpu" not in read["moved"]
    (package / "srt" / "utils.py").write_text("def (\n")  # of a Python that is newer than this
    with pytest.raises(check_next.CannotCheckError, match="this Python cannot read it"):
        check_next.compare(adapter, root, root)


def test_what_cannot_be_checked_is_a_result(tmp_path: Path) -> None:
    row = check_next.check(SGLANG, check_next.ENGINES["sglang"], None, tmp_path)
    assert "python is missing: make setup setup-sglang" in row["problem"]
    assert not check_next.is_good(row)
    assert row["problem"] in check_next.lines(row)[0]


def test_a_release_is_good_if_nothing_moved_and_all_tests_passed() -> None:
    counted = {"passed": 3, "skipped": 0, "failed": {}}
    row = {
        **{"engine": VLLM.engine, "package": VLLM.name, "version": "0.34.0", "verified": False},
        **{"touched": 9, "moved": {}, "new requirements": ["orjson"], "imports": "yes"},
    }
    assert check_next.is_good(row | counted)
    assert check_next.lines(row | counted)[0] == (
        "vLLM 0.34.0 (package vllm), not verified: 0 of 9 names moved"
    )
    for changed, said in (
        (counted | {"moved": {"vllm.config.KernelConfig": "is gone"}}, "KernelConfig is gone"),
        ({"imports": "ImportError: torch"}, "ImportError: torch"),
        ({"tests": "did not end"}, "did not end"),
    ):
        assert not check_next.is_good(row | changed)
        assert said in "\n".join(check_next.lines(row | changed))
