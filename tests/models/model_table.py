"""The table of supported models in README.md, from the registry; run as a program, it writes it.

python -m tests.models.model_table
"""

import json
import pathlib

from paged.models.gguf_families import GGUF_FAMILIES, GGUF_MIXTURES
from paged.models.registry import ARCHITECTURES

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN = "<!-- models: python -m tests.models.model_table -->\n"
END = "<!-- end of models -->\n"


def model_table() -> str:
    """Return the table, one row per architecture: models, name, GGUF name, notes, goldens."""
    goldens = golden_names()
    rows = (*GGUF_FAMILIES.items(), *GGUF_MIXTURES.items())
    gguf = {family.architecture: name for name, family in rows}
    lines = ["| Models | `architectures` | GGUF | Notes | Goldens |", "|---|---|---|---|---|"]
    for name, architecture in ARCHITECTURES.items():
        in_gguf = f"`{gguf[name]}`" if name in gguf else ""
        checked = ", ".join(goldens.get(name, ["none"]))
        row = architecture.models, f"`{name}`", in_gguf, architecture.notes, checked
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def golden_names() -> dict[str, list[str]]:
    """Return the tiny goldens of each architecture, and the real models."""
    folder = ROOT / "tests" / "data" / "golden"
    names: dict[str, list[str]] = {}
    for path in sorted(folder.glob("tiny/*/config.json")):
        architecture = json.loads(path.read_text())["architectures"][0]
        names.setdefault(architecture, []).append(path.parent.name)
    for path in sorted(folder.glob("*.json")):
        golden = json.loads(path.read_text())
        names.setdefault(golden["architecture"], []).append(golden["model"])
    return names


def with_table(text: str) -> str:
    """Return the README's text with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{model_table()}{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
