"""`import paged` is light, and no import of the project does work that a user did not ask for."""

import ast
import importlib
import inspect
import json
import os
import pathlib
import subprocess
import sys

import pytest

import paged

ROOT = pathlib.Path(__file__).parents[1]

IMPORT_ALL = """
for module in pkgutil.walk_packages(paged.__path__, "paged."):
    importlib.import_module(module.name)
"""


def fresh_python(code: str, **env: str) -> object:
    """What `code` leaves in `result`, run in a new interpreter that finds this checkout's paged."""
    prelude = f"import importlib, json, pkgutil, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{prelude}{code}\nprint(json.dumps(result))"],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_takes_under_half_a_second_beyond_numpy():
    # The processor's time, the best of three: what else the machine does can only add.
    code = "import numpy; t = time.process_time(); import paged; result = time.process_time() - t"
    assert min(fresh_python(code) for _ in range(3)) < 0.5


def test_import_loads_no_library():
    code = "import paged; result = sorted({name.split('.')[0] for name in sys.modules})"
    loaded = set(fresh_python(code)) - set(fresh_python("result = sorted(sys.modules)"))
    assert loaded - sys.stdlib_module_names == {"paged"}


def test_policy_of_the_scheduler_loads_no_jax():
    code = "import paged.scheduler.scheduler; result = 'jax' in sys.modules"
    assert fresh_python(code) is False


def test_importing_everything_initialises_no_backend():
    # JAX raises on this name as soon as anything asks for a device or makes an array.
    code = f"import paged\n{IMPORT_ALL}\nresult = 'jax' in sys.modules"
    assert fresh_python(code, JAX_PLATFORMS="no_such_platform") is True


def test_touching_a_backend_would_be_noticed():
    code = "import jax\ntry: jax.devices()\nexcept RuntimeError as e: result = str(e)"
    assert "no_such_platform" in fresh_python(code, JAX_PLATFORMS="no_such_platform")


def test_importing_everything_leaves_torch_alone(tmp_path: pathlib.Path):
    # An empty `torch` first on the path: any import of it, even an optional one, would succeed.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    code = f"import paged\n{IMPORT_ALL}\nresult = 'torch' in sys.modules"
    assert fresh_python(code, PYTHONPATH=str(tmp_path)) is False


@pytest.mark.parametrize("name", sorted(paged._LAZY))
def test_lazy_name_is_what_its_module_defines(name: str):
    module = importlib.import_module(paged._LAZY[name])
    assert getattr(paged, name) is getattr(module, name)
    assert getattr(paged, name).__module__ == module.__name__


def test_dir_lists_the_public_names():
    assert dir(paged) == sorted(paged.__all__) == sorted([*paged._LAZY, "__version__"])


def test_type_checkers_see_the_lazy_names():
    tree = ast.parse(inspect.getsource(paged))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == paged._LAZY


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'paged' has no attribute 'LMM'"):
        paged.LMM  # noqa: B018
