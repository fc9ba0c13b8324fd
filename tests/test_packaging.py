"""Every way to install or read the project gives the same packages, and nothing beside them.

The folders `models/`, `scheduler/` and `server/` are subpackages of `paged` that live outside its
folder (docs/decisions/0001). Each way of use is tried in an interpreter of its own, with a virtual
environment that borrows the packages of the running one: nothing is downloaded.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = {
    "paged": "paged",
    "paged.gpu": "paged/gpu",
    "paged.models": "models",
    "paged.models.quantized": "models/quantized",
    "paged.mosaic": "paged/mosaic",
    "paged.native": "paged/native",
    "paged.scheduler": "scheduler",
    "paged.scheduler.eviction": "scheduler/eviction",
    "paged.scheduler.planning": "scheduler/planning",
    "paged.scheduler.simulator": "scheduler/simulator",
    "paged.scheduler.structured": "scheduler/structured",
    "paged.scheduler.tiers": "scheduler/tiers",
    "paged.server": "server",
    "paged.server.tool_parsers": "server/tool_parsers",
    "paged.triton": "paged/triton",
    "paged.triton.kernels": "paged/triton/kernels",
}
SUBMODULES = ["paged.metadata", "paged.models.config", "paged.scheduler.params", "paged.server.cli"]

# Runs as `python -m probe` in each setting and prints what that interpreter sees.
PROBE = f"""
import importlib, importlib.util, json, pkgutil, sys

names = {[*FOLDERS, *SUBMODULES]!r}
files = {{name: importlib.import_module(name).__file__ for name in names}}
import paged
walk = pkgutil.walk_packages(paged.__path__, "paged.")
tops = ["models", "scheduler", "server"]
print(json.dumps({{
    "files": files,
    "walked": ["paged"] + [module.name for module in walk],
    "imported": [name for name in tops if name in sys.modules],
    "importable": [name for name in tops if importlib.util.find_spec(name)],
}}))
"""


def sources() -> list[str]:
    """Every module of the folders, as a path from the root of the checkout."""
    paths = [path for folder in FOLDERS.values() for path in (ROOT / folder).glob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def data() -> list[str]:
    """What the packages hold beside Python: C++ files, GPUs, a page, as paths from the root."""
    folders = [ROOT / "paged/native/cpp", ROOT / "paged/gpu/targets", ROOT / "server/ui"]
    paths = [path for folder in folders for path in folder.iterdir()]
    return [str(path.relative_to(ROOT)) for path in (*paths, *(ROOT / "server").glob("*.html"))]


def installed(source: str) -> str:
    """Where a module of the checkout lies once installed."""
    return source if source.startswith("paged/") else f"paged/{source}"


def modules() -> list[str]:
    """Dotted name of every module."""
    names = [installed(source).removesuffix(".py").replace("/", ".") for source in sources()]
    return sorted(name.removesuffix(".__init__") for name in names)


def run(*command: str | pathlib.Path, cwd: pathlib.Path, python_path: str | None = None) -> str:
    """Output of a command that must succeed, free of this environment's Python variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PYTHONPATH": python_path} if python_path else {}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def install(python: pathlib.Path, *what: str | pathlib.Path) -> None:
    """Install with the running environment's pip into that of `python`, without any network."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    flags = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile"]
    run(*pip, "install", "--quiet", *flags, *what, cwd=python.parent)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Copy of what the build reads (tests too: they must stay out), with its links, to build in."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    tops = [folder for folder in FOLDERS.values() if "/" not in folder]
    for name in (*tops, "tests"):
        ignore = shutil.ignore_patterns("__pycache__", "node_modules")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    (copy / "probe.py").write_text(PROBE)
    return copy


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder that holds nothing of the project but the probe."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "probe.py").write_text(PROBE)
    return folder


@pytest.fixture(scope="module")
def dist(checkout: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder with the sdist and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, checkout]
    run(*build, cwd=checkout)
    return out


@pytest.fixture(scope="module")
def new_environment(tmp_path_factory: pytest.TempPathFactory):
    """Make a virtual environment with this one's packages but not its `paged`; return its Python.

    A folder named by a .pth file is searched after the environment's own site-packages, and .pth
    files inside it, such as that of an editable install, are not read.
    """

    def make(name: str) -> pathlib.Path:
        folder = tmp_path_factory.mktemp(name)
        venv.create(folder, symlinks=True, with_pip=False)
        site = next(folder.glob("lib/python*/site-packages"))
        borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)))
        return folder / "bin" / "python"

    return make


@pytest.fixture(scope="module")
def regular_install(new_environment, checkout: pathlib.Path) -> pathlib.Path:
    """Python of an environment with a regular install of the checkout."""
    python = new_environment("regular")
    install(python, checkout)
    return python


def assert_house(
    python: pathlib.Path, cwd: pathlib.Path, home: pathlib.Path, python_path: str | None = None
) -> dict[str, list[str]]:
    """Probe `python` in `cwd`: every module is there once, and comes from below `home`."""
    seen = json.loads(run(python, "-m", "probe", cwd=cwd, python_path=python_path))
    assert sorted(seen["walked"]) == modules()
    strangers = [file for file in seen["files"].values() if home not in pathlib.Path(file).parents]
    assert not strangers, f"imported from outside {home}"
    assert seen["imported"] == []
    return seen


def test_editable_install_serves_the_checkout(new_environment, checkout, elsewhere):
    python = new_environment("editable")
    install(python, "--editable", checkout)
    assert assert_house(python, cwd=elsewhere, home=checkout)["importable"] == []


def test_regular_install_is_whole_in_another_directory(regular_install, elsewhere):
    home = regular_install.parents[1]
    assert assert_house(regular_install, cwd=elsewhere, home=home)["importable"] == []


def test_regular_install_does_not_break_the_checkout_root(regular_install, checkout):
    # `python -m` puts the root first on the path: ./paged hides the installed package.
    assert_house(regular_install, cwd=checkout, home=checkout)


def test_wheel_built_from_the_sdist_is_whole(new_environment, dist, elsewhere):
    python = new_environment("wheel")
    install(python, next(dist.glob("*.whl")))
    home = python.parents[1]
    assert assert_house(python, cwd=elsewhere, home=home)["importable"] == []
    assert "serve" in run(python.with_name("paged"), "--help", cwd=elsewhere)


def test_checkout_on_the_path_needs_no_install(new_environment, checkout, elsewhere):
    python = new_environment("bare")
    assert_house(python, cwd=elsewhere, home=checkout, python_path=str(checkout))


def test_wheel_holds_the_packages_and_nothing_else(dist):
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        notice = next(name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
        assert wheel.read(notice) == (ROOT / "LICENSE").read_bytes()
    assert sorted(names) == sorted([*map(installed, [*sources(), *data()]), "paged/py.typed"])


def test_sdist_holds_each_source_once_and_no_test(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        members = [member for member in sdist.getmembers() if not member.isdir()]
    names = [member.name.split("/", 1)[1] for member in members]
    assert sorted(name for name in names if name.endswith(".py")) == sources()
    assert {"pyproject.toml", "README.md", "LICENSE", "paged/py.typed", *data()} <= set(names)
    assert all(member.isfile() for member in members), "a link would be a second copy of a module"


def needed(requirements: list[str]) -> dict[str, list[Requirement]]:
    """Requirements by distribution, those of the installed distributions included."""
    found: dict[str, list[Requirement]] = {}
    todo = [(Requirement(line), "") for line in requirements]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement in found.setdefault(name, []):
            continue
        found[name].append(requirement)
        lines = importlib.metadata.distribution(name).requires or []
        todo += [
            (Requirement(line), extra) for line in lines for extra in {"", *requirement.extras}
        ]
    return found


def pinned() -> dict[str, str]:
    """Versions in constraints.txt by distribution."""
    text = (ROOT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert not [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+!]+", line)]
    pins = {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}
    assert len(pins) == len(lines)
    return pins


def test_constraints_pin_every_dependency_exactly():
    pins = pinned()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = needed(project["dependencies"] + project["optional-dependencies"]["test"])
    assert not set(found) - set(pins), "installed without a pin"
    broken = [
        f"{requirement} but {name}=={pins[name]}"
        for name, requirements in found.items()
        for requirement in requirements
        if not requirement.specifier.contains(pins[name], prereleases=True)
    ]
    assert not broken
