"""Exported programs of a step in a folder: traced once, anywhere, and compiled where they run.

An artifact holds each program as StableHLO, with the machine code of its Triton kernels inside, and
a manifest of all that it was made for. Whoever loads it traces no model and needs no Triton; XLA
compiles once per machine, after which an `ExecutableStore` has the result (docs/decisions/0030).
"""

import hashlib
import json
import pathlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import export

from paged.models.programs import Program, ProgramSource

MANIFEST = "manifest.json"
_FORMAT = 2

# The only custom calls that an exported program may hold beside those that XLA keeps stable.
_ALLOWED = [export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened artifact.

    Attributes:
      folder: where it lies.
      settings: what it was made for, by name, in the order in which it is compared.
      programs: file and SHA-256 of each program, by its name.
      digest: of the whole manifest.
    """

    folder: pathlib.Path
    settings: Mapping[str, Any]
    programs: Mapping[str, tuple[str, str]]
    digest: str

    @classmethod
    def open(cls, folder: str | pathlib.Path) -> "Artifact":
        """Read the manifest of a folder.

        Raises:
          ValueError: if there is none, or one that this version cannot read.
        """
        path = pathlib.Path(folder).expanduser() / MANIFEST
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            raise ValueError(
                f"artifact={str(folder)!r} is no artifact: there is no {MANIFEST} in it; make one "
                "with `paged compile MODEL --out DIR`."
            ) from None
        content = json.loads(text)
        if content.get("format") != _FORMAT:
            raise ValueError(
                f"{path} has format {content.get('format')!r}, this version reads {_FORMAT}; run "
                "`paged compile` again."
            )
        programs = {name: (file, digest) for name, (file, digest) in content["programs"].items()}
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(path.parent, content["settings"], programs, digest)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Compare what it was made for with what is there.

        Raises:
          ValueError: names the first setting that differs.
        """
        for name, there in self.settings.items():
            here = _as_json(settings.get(name))
            if here != there:
                raise ValueError(
                    f"the artifact {self.folder} was made for {name}={there!r}, but here it is "
                    f"{here!r}; change it, or run `paged compile` again."
                )

    def read(self, name: str) -> bytes:
        """Return a program as it was exported.

        Raises:
          ValueError: if the artifact lacks it, or its file is missing or damaged.
        """
        if name not in self.programs:
            raise ValueError(
                f"the artifact {self.folder} has no program {name!r}; run `paged compile` again."
            )
        file, digest = self.programs[name]
        try:
            content = (self.folder / file).read_bytes()
        except OSError as error:
            raise ValueError(f"{self.folder / file} cannot be read: {error.strerror}.") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{self.folder / file} is damaged; run `paged compile` again.")
        return content


@dataclass(frozen=True, slots=True)
class ArtifactPrograms:
    """A source of programs that are in an artifact.

    Attributes:
      artifact: holds the programs.
      store: keeps what XLA makes of them.
    """

    artifact: Artifact
    store: ProgramSource

    def make(self, program: Program) -> Any:
        """Return the compiled program; its own function is not traced.

        Raises:
          ValueError: as `Artifact.read`.
        """
        tree = jax.tree.structure(program.outputs)

        def call(*arguments: Any) -> Any:
            exported = export.deserialize(bytearray(self.artifact.read(program.name)))
            leaves = exported.call(*jax.tree.leaves(arguments))  # type: ignore[no-untyped-call]
            return jax.tree.unflatten(tree, leaves)

        # Donation is not part of an exported program.
        return self.store.make(
            Program(program.name, call, program.arguments, program.outputs, program.donated)
        )


@dataclass(slots=True)
class ArtifactWriter:
    """A source of programs that only writes them to an artifact; nothing is compiled.

    Attributes:
      folder: made if missing.
      platform: that the programs are for: "cpu" or "cuda".
    """

    folder: pathlib.Path
    platform: str
    _programs: dict[str, tuple[str, str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self, program: Program) -> None:
        """Trace and lower a program and write it; flattened, so that no type of ours is in it."""
        leaves, tree = jax.tree.flatten(program.arguments)

        def flat(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(program.function(*jax.tree.unflatten(tree, leaves)))

        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]  # type: ignore[no-untyped-call]
        exporter = export.export(jax.jit(flat), platforms=[self.platform], disabled_checks=_ALLOWED)
        content = exporter(*shapes).serialize()
        digest = hashlib.sha256(content).hexdigest()
        kind = re.sub(r"\W.*", "", program.name)
        file = f"{kind}-{hashlib.sha256(program.name.encode()).hexdigest()[:16]}.stablehlo"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / file).write_bytes(content)
        with self._lock:
            self._programs[program.name] = file, digest

    def finish(self, settings: Mapping[str, Any]) -> None:
        """Write the manifest: only now is the folder an artifact."""
        content = {
            "format": _FORMAT,
            "settings": _as_json(settings),
            "programs": dict(sorted(self._programs.items())),
        }
        text = json.dumps(content, indent=1) + "\n"
        scratch = self.folder / f"{MANIFEST}.part"
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(self.folder / MANIFEST)


def _as_json(value: Any) -> Any:
    """Return a value as it comes back from a file."""
    return json.loads(json.dumps(value))
