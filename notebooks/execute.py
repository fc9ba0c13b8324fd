"""Run the notebooks: `python notebooks/execute.py` renews the .ipynb beside each script.

A script is what is edited; the .ipynb holds the same cells with their output, for those who only
look.
"""

import argparse
import base64
import io
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING

import jupytext
import nbclient
import nbformat
from PIL import Image
from traitlets.config import Config

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER = pathlib.Path(__file__).parent
# The figure that README.md shows: the first one of this notebook.
SHOWN, SHOWN_PICTURE = "03_lru_collapse", FOLDER / "lru_collapse.png"
SCRIPTS = sorted(FOLDER.glob("[0-9]*.py"))
_CELL_SECONDS = 240


def execute(script: pathlib.Path, last_cell: str = "") -> "NotebookNode":
    """Return a notebook with the output of all its cells.

    Args:
      script: of the notebook, in the percent format.
      last_cell: code to run after all others.

    Raises: nbclient.exceptions.CellExecutionError if a cell raises.
    """
    notebook = read(script)
    if last_cell:
        notebook.cells.append(nbformat.v4.new_code_cell(last_cell, id="last"))
    # The checkout's own packages, however it is installed.
    path = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as sockets:
        # Not over TCP, where others on the machine could listen.
        connection = {"transport": "ipc", "ip": f"{sockets}/kernel"}
        nbclient.NotebookClient(
            notebook,
            config=Config(KernelManager=connection),
            kernel_name="python3",
            timeout=_CELL_SECONDS,
            record_timing=False,
            resources={"metadata": {"path": str(FOLDER)}},
        ).execute(env=os.environ | {"PYTHONPATH": path})
    return notebook


def read(script: pathlib.Path) -> "NotebookNode":
    """Return the notebook of a script, without output and the same each time."""
    notebook = jupytext.read(script)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # random otherwise
    return notebook


def write(notebook: "NotebookNode", path: pathlib.Path) -> None:
    """Write a notebook: small figures, and nothing that differs from machine to machine."""
    kernel = notebook.metadata["kernelspec"]
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel})
    for picture in pictures(notebook):
        picture["image/png"] = _with_palette(picture["image/png"])
    nbformat.write(notebook, path)


def pictures(notebook: "NotebookNode") -> "list[NotebookNode]":
    """Return the data of all outputs that are figures, by type."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output.data for output in outputs if "image/png" in output.get("data", {})]


def _with_palette(png: str) -> str:
    """Return a picture in 128 colours, as base64: a third of the bytes, and looks the same."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    small = io.BytesIO()
    picture.quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    """Run the notebooks that are named, or all, and write them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("scripts", nargs="*", type=pathlib.Path, default=SCRIPTS)
    for script in parser.parse_args().scripts:
        path = script.with_suffix(".ipynb")
        notebook = execute(script)
        write(notebook, path)
        if script.stem == SHOWN:
            SHOWN_PICTURE.write_bytes(base64.b64decode(pictures(notebook)[0]["image/png"]))
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
