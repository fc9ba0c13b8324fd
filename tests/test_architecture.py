"""The house stays a house: four floors, stairs only down (docs/architecture.md).

Reads the imports of every source file; import linters do not see the mapped folders. Each rule is
first shown a file that breaks it.
"""

import ast
import functools
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

import paged

ROOT = pathlib.Path(__file__).parents[1]
FLOORS = ["paged", "models", "scheduler", "server"]  # bottom to top; each is a folder of the root

# The lazy names that `paged/__init__.py` offers are the one upward reference.
LOOKS_UP = "paged/__init__.py"

# Package files that offer lazy names -> what they may import.
LAZY_PACKAGES = {
    "paged/__init__.py": {"importlib", "typing", "paged._version"},
    "models/__init__.py": {"importlib", "typing"},
}

# The files of scheduler/ that meet the floors below; the rest is policy, in plain Python and numpy.
REACHES_DOWN = {
    "advice",  # asks ModelConfig for the longest context
    "admission",  # tokenizes bad words
    "artifacts",  # compares what programs were made for with what is here
    "async_engine",  # exposes the checkpoint and its tokenizer to the server
    "backend_choice",  # asks backends what they support, and loads the kernels
    "batching",  # fills the batch types
    "compiler",  # makes the grammar library's tokenizer and masks of the model's size
    "capacity",  # asks KVCacheSpec for bytes
    "exporting",  # traces the model for an absent GPU
    "engine",  # holds the tokenizer and the runner
    "engine_thread",  # traces steps by JAX's profiler
    "host_rates",  # times the products of this CPU
    "fit",  # asks for bytes of weights and of blocks
    "llm",  # exposes the tokenizer
    "loading",  # opens the checkpoint and builds everything
    "logprobs",  # asks the tokenizer for the text of tokens
    "memory",  # asks for bytes of weights, of blocks and of adapters
    "model_presets",  # fills ModelConfig
    "plan",  # asks what the model is, and how it can be split
    "roofline",  # asks KVCacheSpec and ModelConfig for sizes
    "resolution",  # asks the device for its memory, and the model for its limits
    "row_table",  # asks for sampling parameters as the device reads them
    "offloading",  # makes what moves blocks on the device
    "placement",  # places parameters and cache on devices
    "output_processor",  # hands the tokenizer to what decodes
    "speed",  # asks ModelConfig for the roofline
    "step_work",  # asks ModelConfig and its weights for sizes
    "runner",  # calls the compiled steps
    "step_programs",  # compiles them
    "workload",  # asks for the windows of layers
    "transfer",  # copies blocks of the cache
    "wide_edits",  # fills the batch types
}
USES_JAX = {"exporting", "host_rates", "loading", "placement", "runner", "transfer"}
JAX = {"jax", "jaxlib", "flax", "jaxtyping", "optax", "orbax"}

# Libraries that belong to the top floor alone.
HTTP = {"aiohttp", "prometheus_client"}

# Where the environment may be read, besides server/cli*.py.
READS_ENVIRONMENT: dict[str, str] = {
    "models/executables.py": "XLA_FLAGS is part of what a compiled program is made from",
    "paged/gpu/mosaic_dump.py": "sets what makes Mosaic's compiler show its code, and puts it back",
}


@dataclass(frozen=True)
class Source:
    """One parsed file; `path` is relative to the root, as in "scheduler/runner.py"."""

    path: str
    tree: ast.Module

    @property
    def floor(self) -> str:
        return self.path.split("/")[0]

    @property
    def stem(self) -> str:
        return pathlib.PurePath(self.path).stem

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of each import, wherever it stands; lazy names by their module."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                if module != "paged":
                    yield node.lineno, module
                    continue
                for alias in node.names:
                    yield node.lineno, paged._LAZY.get(alias.name, f"paged.{alias.name}")


def floor_of(module: str) -> str | None:
    """The floor that a dotted name belongs to; None for other people's modules."""
    top, _, rest = module.partition(".")
    if top != "paged":
        return None
    folder = rest.partition(".")[0]
    return folder if folder in FLOORS[1:] else "paged"


def stairs_go_only_down(source: Source) -> Iterator[str]:
    if source.floor not in FLOORS or source.path == LOOKS_UP:
        return
    for line, module in source.imports():
        floor = floor_of(module)
        if module == "paged":
            yield f"{line}: import a module of paged, not all of it"
        elif floor and FLOORS.index(floor) > FLOORS.index(source.floor):
            yield f"{line}: {source.floor}/ imports {module}, a floor above"


def policy_is_plain_python(source: Source) -> Iterator[str]:
    if source.floor != "scheduler":
        return
    for line, module in source.imports():
        if source.stem not in REACHES_DOWN and floor_of(module) in ("paged", "models"):
            yield f"{line}: {source.path} imports {module} but is not in REACHES_DOWN"
        if source.stem not in USES_JAX and module.split(".")[0] in JAX:
            yield f"{line}: {source.path} imports {module} but is not in USES_JAX"


def server_names_no_jax(source: Source) -> Iterator[str]:
    if source.floor == "server":
        for line, module in source.imports():
            if module.split(".")[0] in JAX:
                yield f"{line}: server/ imports {module}"


def http_stays_in_server(source: Source) -> Iterator[str]:
    if source.floor in FLOORS[:-1]:
        for line, module in source.imports():
            if module.split(".")[0] in HTTP:
                yield f"{line}: {source.floor}/ imports {module}"


def package_files_import_nothing(source: Source) -> Iterator[str]:
    if source.floor not in FLOORS or source.stem != "__init__":
        return
    statements, allowed = source.tree.body, LAZY_PACKAGES.get(source.path, set())
    if allowed:
        statements = [
            node
            for node in statements
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ]
    for line, module in Source(source.path, ast.Module(statements, [])).imports():
        if module not in allowed:
            yield f"{line}: {source.path} imports {module}"


def imports_are_absolute_and_start_at_paged(source: Source) -> Iterator[str]:
    for line, module in source.imports():
        if module.startswith("."):
            yield f"{line}: relative import {module}"
        elif module.split(".")[0] in FLOORS[1:]:
            yield f"{line}: import {module} works by accident; say paged.{module}"


def torch_is_never_imported(source: Source) -> Iterator[str]:
    for line, module in source.imports():
        if "torch" in module.split("."):
            yield f"{line}: imports {module}"


def environment_is_read_by_the_command_line(source: Source) -> Iterator[str]:
    if source.floor not in FLOORS or source.path in READS_ENVIRONMENT:
        return
    if source.floor == "server" and source.stem.startswith("cli"):
        return
    readers = {"environ", "environb", "getenv", "getenvb"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        else:
            continue
        for name in sorted(names & readers):
            yield f"{node.lineno}: {source.path} reads os.{name}; pass the value as an argument"


type Rule = Callable[[Source], Iterator[str]]

# Each rule with files that break it: (rule, path, code).
BREAKS: list[tuple[Rule, str, str]] = [
    (stairs_go_only_down, "paged/kv_cache.py", "from paged.models import batch"),
    (stairs_go_only_down, "models/step.py", "import paged.scheduler.runner"),
    (stairs_go_only_down, "models/step.py", "def f():\n    from paged import LLM"),
    (stairs_go_only_down, "scheduler/llm.py", "from paged import server"),
    (stairs_go_only_down, "scheduler/llm.py", "if TYPE_CHECKING:\n    import paged.server.app"),
    (stairs_go_only_down, "scheduler/llm.py", "import paged"),
    (policy_is_plain_python, "scheduler/scheduler.py", "import jax.numpy as jnp"),
    (
        policy_is_plain_python,
        "scheduler/scheduler.py",
        "from paged.models import batch",
    ),
    (policy_is_plain_python, "scheduler/scheduler.py", "from paged import KVCache"),
    (policy_is_plain_python, "scheduler/batching.py", "from jax import Array"),
    (server_names_no_jax, "server/app.py", "from jax import Array"),
    (server_names_no_jax, "server/app.py", "import flax.nnx"),
    (http_stays_in_server, "scheduler/stats.py", "from prometheus_client import Counter"),
    (package_files_import_nothing, "models/__init__.py", "from paged.models.batch import x"),
    (package_files_import_nothing, "paged/__init__.py", "import jax"),
    (package_files_import_nothing, "server/__init__.py", "import importlib"),
    (imports_are_absolute_and_start_at_paged, "models/step.py", "from . import batch"),
    (imports_are_absolute_and_start_at_paged, "models/step.py", "from ..paged import kv_cache"),
    (imports_are_absolute_and_start_at_paged, "tests/test_x.py", "import models.batch"),
    (imports_are_absolute_and_start_at_paged, "tests/test_x.py", "from server import app"),
    (torch_is_never_imported, "tests/test_x.py", "import torch.nn as nn"),
    (torch_is_never_imported, "models/weights.py", "from safetensors.torch import load_file"),
    (environment_is_read_by_the_command_line, "models/demo.py", "os.environ['HOME']"),
    (environment_is_read_by_the_command_line, "models/demo.py", "os.getenv('HOME')"),
    (environment_is_read_by_the_command_line, "server/app.py", "from os import environ as env"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in BREAKS))


@functools.cache
def checkout() -> list[Source]:
    """Every Python file of the floors, the tests and the benchmarks; links are not followed."""
    folders = [*FLOORS, "tests", "benchmarks", "notebooks"]
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [Source(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in paths]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule):
    broken = [f"{source.path}:{found}" for source in checkout() for found in rule(source)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("rule", "path", "code"), BREAKS)
def test_rule_can_fail(rule: Rule, path: str, code: str):
    assert list(rule(Source(path, ast.parse(code))))


def test_every_floor_is_read_once():
    paths = [source.path for source in checkout()]
    assert len(set(paths)) == len(paths)
    assert {path.split("/")[0] for path in paths} >= {*FLOORS, "tests"}
    assert not [path for path in paths if path.startswith(tuple(f"paged/{f}/" for f in FLOORS))]


def test_exceptions_are_still_needed():
    stems = {source.stem for source in checkout() if source.floor == "scheduler"}
    assert not REACHES_DOWN - stems, "files that are gone"
    for source in checkout():
        if source.floor == "scheduler" and source.stem in REACHES_DOWN:
            floors = {floor_of(module) for _, module in source.imports()}
            assert floors & {"paged", "models"}, f"{source.path} need not be in REACHES_DOWN"


def test_every_room_stands_in_the_description_of_the_house():
    description = (ROOT / "docs" / "architecture.md").read_text()
    tables = {}
    for floor in FLOORS:
        start = description.index(f"| `{floor}/` | |")
        tables[floor] = description[start : description.index("\n\n", start)]
    missing = [
        f"{floor}/{name}"
        for floor in FLOORS
        for file in sorted((ROOT / floor).rglob("*.py"))
        if (name := str(file.relative_to(ROOT / floor))) and not file.name.startswith("_")
        if f"`{name}`" not in tables[floor]
    ]
    assert not missing, "name these files in docs/architecture.md"
