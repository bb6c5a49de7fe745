"""Build every image of deploy/docker with buildah, and run those for CPU with podman.

    python3 deploy/images.py [--only IMAGE ...] [--json FILE]

Standard library only; needs root and Debian's packages, which it installs. Images are based on the
official ones where those can be pulled. Elsewhere a Debian by debootstrap stands in for Python, and
images on the engines' own ones are left out. The machine's settings of pip and apt, and its
certificates, are there while an image is built.
"""

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from environment import ROOT, ensure_installed, has_program
from services import machine, run_images

DOCKER = ROOT / "deploy" / "docker"
PYTHON = DOCKER / "vllm-cpu.Dockerfile"  # which says on which Python all are based
IMAGES = ("vllm-cpu", "sglang-cpu", "vllm", "sglang")
PROGRAMS = ("buildah", "podman", "runc", "debootstrap")  # as their packages are called
STAND_IN = "localhost/ultraep-serve/stand-in"
DEBIAN = "python3-venv,python3-dev,python3-pip,python-is-python3,ca-certificates"
COPYING = """[storage]
driver = "vfs"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
"""
APT = """APT::Keep-Downloaded-Packages "false";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
"""


@dataclass(frozen=True)
class Base:
    """What an image is built on."""

    name: str  # as its Dockerfile says
    id: str  # here
    is_stand_in: bool
    bytes: int
    seconds: float  # to pull or to make


@dataclass(frozen=True)
class Image:
    """An image that was built."""

    name: str
    base: str
    is_on_stand_in: bool
    seconds: float  # without its base
    bytes: int
    own_bytes: int  # without its base


class Builder:
    """Builds images, with what this machine needs to reach its registries in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bases: dict[str, Base] = {}

    def image(self, name: str) -> Image | None:
        """Build ``name`` from its Dockerfile; None where its base cannot be had."""
        file = DOCKER / f"{name}.Dockerfile"
        if (base := self.base(_base_of(file))) is None:
            return None
        began = time.monotonic()
        self._build(f"ultraep-serve:{name}", base.id, file, ROOT)
        seconds = time.monotonic() - began
        size = _size(f"ultraep-serve:{name}")
        return Image(name, base.name, base.is_stand_in, round(seconds, 1), size, size - base.bytes)

    @property
    def bases(self) -> list[Base]:
        """Those that were used."""
        return list(self._bases.values())

    def base(self, name: str) -> Base | None:
        """The official image ``name``; for Python a stand-in where that cannot be pulled."""
        if name not in self._bases:
            began = time.monotonic()
            found = self._pulled(name)
            if found is None and not name.startswith("python:"):
                return None
            used = found or self._debian(name)
            seconds = round(time.monotonic() - began, 1)
            self._bases[name] = Base(name, used, found is None, _size(used), seconds)
        return self._bases[name]

    def _pulled(self, name: str) -> str | None:
        command = ["buildah", "pull", "--quiet", f"docker://{name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1]
            print(f"{name} cannot be pulled: {why}", flush=True)
            return None
        return done.stdout.strip()

    def _debian(self, name: str) -> str:
        """The Debian and its Python that ``name`` says, as in python:3.11-slim-bookworm."""
        version, _, suite = name.removeprefix("python:").split("-")
        made = _output("buildah", "from", "scratch")
        root = Path(_output("buildah", "mount", made))
        try:
            mirror = [site for site, name in _mirrors() if name == suite][:1]
            debootstrap = ["debootstrap", "--variant=minbase", f"--include={DEBIAN}", suite, root]
            _run(*debootstrap, *mirror, quiet=True)
            found = _output("chroot", root, "python3", "--version")
            if not found.startswith(f"Python {version}."):
                sys.exit(f"Debian {suite} has {found}, and not {version}")
            for path in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
                path.unlink()  # pip may install, as in the official image
            shutil.rmtree(root / "var" / "lib" / "apt" / "lists")
            for package in root.glob("var/cache/apt/archives/*.deb"):
                package.unlink()
            (root / "etc" / "apt" / "apt.conf.d" / "docker-clean").write_text(APT)
            _run("buildah", "config", "--cmd", "python3", "--env", "LANG=C.UTF-8", made)
            return _output("buildah", "commit", "--quiet", made, f"{STAND_IN}:python")
        finally:
            _run("buildah", "rm", made, quiet=True)

    def _build(self, name: str, base: str, file: Path, context: Path) -> None:
        print(f"building {name}", flush=True)
        subprocess.run(["buildah", "rmi", name], capture_output=True, check=False)
        options = ["--isolation", "chroot", "--network", "host", "--format", "docker", "--quiet"]
        settings = self._settings().items()
        volumes = [f"--volume={source}:{target}:ro" for target, source in settings]
        what = ["--from", base, "--file", file, "--tag", name, context]
        _run("buildah", "bud", *options, *volumes, *what)

    def _settings(self) -> dict[Path, Path]:
        """Files and folders of this machine by where they are in a build."""
        pip = self._folder / "pip.conf"
        pip.write_text(_pip_settings())
        found = {path: path for path in _paths_in(pip.read_text())}
        apt = self._folder / "apt.conf"
        lines = _output("apt-config", "dump", "Acquire").splitlines()
        own = [line for line in lines if re.match(r"Acquire::(https?|Check)", line)]
        apt.write_text("".join(f"{line}\n" for line in own))
        found |= {Path("/etc/pip.conf"): pip, Path("/etc/apt/apt.conf"): apt}
        suite = _base_of(PYTHON).rpartition("-")[2]
        mirrors = [(site, name) for site, name in _mirrors() if name.partition("-")[0] == suite]
        if mirrors:  # in the place of the image's own
            sources, others = self._folder / "sources.list", self._folder / "sources.list.d"
            sources.write_text("".join(f"deb {site} {name} main\n" for site, name in mirrors))
            others.mkdir(exist_ok=True)
            found |= {Path("/etc/apt") / path.name: path for path in (sources, others)}
        return found


def _base_of(file: Path) -> str:
    (name,) = re.findall(r"^FROM (\S+)$", file.read_text(), re.MULTILINE)
    return str(name)


def _pip_settings() -> str:
    """All that pip is told on this machine, by files and variables, as one file."""
    listed = _output(sys.executable, "-m", "pip", "config", "list")
    sections: dict[str, dict[str, list[str]]] = {"global": {}}
    for key, text in re.findall(r"^(\S+?)=('.*'|\".*\")$", listed, re.MULTILINE):
        section, _, name = key.rpartition(".")
        value = ast.literal_eval(text).split()
        if section == ":env:":  # stronger than files
            sections["global"][name] = value
        else:
            sections.setdefault(section, {}).setdefault(name, value)
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{name} = {' '.join(v)}" for name, v in values.items())]
    return "".join(f"{line}\n" for line in lines)


def _paths_in(settings: str) -> Iterator[Path]:
    """What pip's settings name on this machine: an index with the files beside it, and others."""
    for word in settings.split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            yield path.parent if word.startswith("file://") else path


def _mirrors() -> list[tuple[str, str]]:
    """Where apt finds Debian's releases on this machine: address and name of the release."""
    listed = _output("apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)")
    rows = [line.split() for line in listed.splitlines()]
    return [(row[0], row[1]) for row in rows if len(row) == 2]


def _size(image: str) -> int:
    return int(_output("podman", "image", "inspect", "--format", "{{.Size}}", image))


def _is_built(image: str) -> bool:
    return _succeeds("podman", "image", "exists", f"ultraep-serve:{image}")


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _output(*command: str | Path) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _run(*command: str | Path, quiet: bool = False) -> None:
    """Ends the program where ``command`` fails; its own message explains why."""
    output = subprocess.DEVNULL if quiet else None
    if subprocess.run(command, cwd=ROOT, stdout=output, check=False).returncode:
        sys.exit(f"{shlex.join(map(str, command))} failed; its message is above")


def main() -> int:
    """Exit status: 1 where an image that runs here is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=IMAGES, default=IMAGES, metavar="IMAGE")
    parser.add_argument("--run-only", action="store_true", help="those that were built before")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # containers end with this process
    ensure_installed({name: has_program(name) for name in PROGRAMS})
    ensure_installed({"python3-pip": _succeeds(sys.executable, "-m", "pip", "--version")})
    began = time.monotonic()
    document: dict[str, Any] = {"command": shlex.join(["python3", *sys.argv])}
    with tempfile.TemporaryDirectory(prefix="ultraep-images-", dir="/var/tmp") as work:
        folder = Path(work)
        folder.chmod(0o755)  # the images' user reads a model in it
        if not _succeeds("buildah", "info"):  # no overlay file system is to be had
            (folder / "storage.conf").write_text(COPYING)
            os.environ["CONTAINERS_STORAGE_CONF"] = str(folder / "storage.conf")  # podman's too
        if not arguments.run_only:
            builder = Builder(folder)
            images = [made for name in arguments.only if (made := builder.image(name))]
            document["bases"] = [asdict(base) for base in builder.bases]
            document["images"] = [asdict(image) for image in images]
            document["build_seconds"] = round(time.monotonic() - began)
        there = [name for name in arguments.only if _is_built(name)]
        runs = run_images(there, folder)
        document["machine"] = machine(there[0])
    document["runs"] = [asdict(run) for run in runs]
    document["seconds"] = round(time.monotonic() - began)
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    wrong = sum(not row.is_right for run in runs for row in run.checks)
    print(f"{len(arguments.only)} images, {len(runs)} runs, {wrong} of their checks wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
