"""Wheel and sdist: complete, one version, and what is installed from them runs anywhere."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections import defaultdict
from datetime import date
from email.parser import Parser
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.version import Version

from docs.generate.reference import DOCS
from ultraep_serve import __version__

ROOT = DOCS.parent
FOLDERS = [
    ROOT / name for name in ("ultraep_serve", "kernels/ultraep_kernels", "benchmarks/ultraep_lab")
]
DESCRIBED = f"ultraep_serve-{__version__}.dist-info"
NOT_PACKAGED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def run(*command: str | Path, folder: Path, **more: str) -> str:
    """What ``command`` prints, run in ``folder`` as by somebody who has only installed things.

    ``more`` variables of the environment.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """The wheel or sdist that pip would make from ``source``, offline."""
    code = f"import sys; from setuptools import build_meta as b; b.build_{kind}(sys.argv[1])"
    target.mkdir()
    run(sys.executable, "-c", code, target, folder=source)
    (made,) = target.iterdir()
    return made


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that packages are made of, where building may leave things behind."""
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools 77 or newer")
    copy = tmp_path_factory.mktemp("package") / "source"
    for folder in FOLDERS:
        shutil.copytree(folder, copy / folder.relative_to(ROOT), ignore=NOT_PACKAGED)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.in"), ROOT / "LICENSE", ROOT / "pyproject.toml"):
        shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build("wheel", source, source.parent / "wheel")


@pytest.fixture(scope="module")
def programs(wheel: Path) -> Path:
    """Programs of a fresh environment with the wheel in it; its dependencies are this one's."""
    environment = wheel.parent.parent / "environment"
    venv.create(environment, with_pip=False)
    variables = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", variables))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, folder=environment)
    return python.parent


def test_wheel_holds_every_file_of_its_packages(wheel: Path) -> None:
    found = contents(wheel)
    expected = {
        str(path.relative_to(folder.parent)): path.read_bytes()
        for folder in FOLDERS
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {f"{folder.name}/py.typed" for folder in FOLDERS} <= expected.keys()
    assert "ultraep_serve/sidecar/static/index.html" in expected
    assert {name: found[name] for name in found if not name.startswith(DESCRIBED)} == expected
    assert f"{DESCRIBED}/licenses/LICENSE" in found


def test_wheel_says_version_and_entry_points(wheel: Path) -> None:
    found = contents(wheel)
    assert Parser().parsestr(found[f"{DESCRIBED}/METADATA"].decode())["Version"] == __version__
    entry_points = found[f"{DESCRIBED}/entry_points.txt"].decode()
    for group in ("console_scripts", "ultraep_serve.commands", "vllm.general_plugins"):
        assert f"[{group}]" in entry_points


def test_sdist_makes_the_same_wheel(source: Path, wheel: Path) -> None:
    archive = build("sdist", source, source.parent / "sdist")
    subprocess.run(["tar", "-xzf", archive, "-C", archive.parent], check=True)
    unpacked = archive.parent / archive.name.removesuffix(".tar.gz")
    assert (unpacked / "CHANGELOG.md").exists()
    again = build("wheel", unpacked, source.parent / "wheel-of-sdist")
    assert contents(again) == contents(wheel)


def test_what_is_installed_runs_anywhere(programs: Path, tmp_path: Path) -> None:
    ours = programs / "ultraep-serve"
    where = "import ultraep_serve, ultraep_kernels as k; print(ultraep_serve.__file__, k.__file__)"
    files = run(programs / "python", "-c", where, folder=tmp_path).split()
    assert all(Path(file).is_relative_to(programs.parent) for file in files), files
    assert run(ours, "--version", folder=tmp_path).startswith(f"ultraep-serve {__version__}\n")
    small = ("--tokens", "2048", "--layers", "2", "--ep", "4")
    run(ours, "make-trace", *small, "--out", "trace.npz", folder=tmp_path)
    replay = ("replay", "trace.npz", "--ep", "4", "--batch-tokens", "1024", "--policies", "quota")
    # Kernels as they are written: compiling all of them once more takes most of a minute.
    assert "quota" in run(ours, *replay, folder=tmp_path, NUMBA_DISABLE_JIT="1")


def test_packages_of_what_serves_form_no_circle() -> None:
    """Nor do its modules at the top; imports for types alone count too."""
    root, needs = ROOT / "ultraep_serve", defaultdict[str, set[str]](set)
    for path in root.rglob("*.py"):
        own = path.relative_to(root).parts[0].removesuffix(".py")
        for found in re.findall(r"^ *from ultraep_serve\.(\w+)", path.read_text(), re.MULTILINE):
            needs[own] |= {found} - {own}
    TopologicalSorter(needs).prepare()


def test_changelog_begins_with_this_version_and_only_that_may_be_unreleased() -> None:
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions, dates = zip(*(section.split(maxsplit=1) for section in sections), strict=True)
    assert versions[0] == __version__
    assert list(versions) == sorted(versions, key=Version, reverse=True)
    days = [date.fromisoformat(text.strip("()")) for text in dates if text != "(unreleased)"]
    assert days == sorted(days, reverse=True)
    assert "(unreleased)" not in dates[1:]


def test_every_tag_is_of_a_commit_with_its_version_and_of_a_section_with_a_date() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git, so there are no tags")
    text = (ROOT / "CHANGELOG.md").read_text()
    for tag in run("git", "tag", "--list", "v*", folder=ROOT).split():
        package = run("git", "show", f"{tag}:ultraep_serve/__init__.py", folder=ROOT)
        assert f'__version__ = "{tag[1:]}"' in package
        assert re.search(rf"^## {re.escape(tag[1:])} \(\d{{4}}-", text, re.MULTILINE), tag
