"""The competitors by name: whose they are, what they need, how they are started."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.competitors import (
    Competitor,
    EngineProcess,
    Process,
    engine_arguments,
)
from benchmarks.peers.folder import INSTALL_COMMAND, PeerFolder
from benchmarks.peers.protocol import Settings
from benchmarks.peers.servers import HttpServer, ServerStart, StartServer
from paged.scheduler.config import EngineConfig

PEERS = ("vllm", "llama.cpp", "transformers")

_ROOT = Path(__file__).parents[2]
_MODEL_LEN = 2048
_LONG_MODEL_LEN = 4352
_VLLM_KV_GIB = "2"  # as much as `paged` takes on a CPU


def peer_of(name: str) -> str:
    """Return the peer that a competitor belongs to, or "paged"."""
    return name.removesuffix("-server").removesuffix("-start")


@dataclass(frozen=True)
class LineUp:
    """Starts competitors.

    Attributes:
      folder: of the peers.
      gguf: file of the demo model.
      cores: that every competitor may use.
      timeout: seconds that loading or a job may take.
    """

    folder: PeerFolder
    gguf: Path
    cores: Sequence[int]
    timeout: float

    def missing(self, name: str) -> str | None:
        """Return what a competitor lacks, or None if it can be started."""
        if name == "paged-int8":
            fields = {field.name for field in dataclasses.fields(EngineConfig)}
            return None if "quantization" in fields else "EngineConfig has no quantization"
        if name.startswith("paged"):
            return None
        needed = [self.folder.llama_cpp_python]
        if name != "llama.cpp":
            needed = [self.folder.vllm_python, self.folder.hf_directory]
        if all(path.exists() for path in needed):
            return None
        return f"not installed; run {INSTALL_COMMAND} --dir {self.folder.root}"

    def start(self, name: str) -> Competitor:
        """Start a competitor. Raises: CompetitorError."""
        if name.endswith("-server"):
            return HttpServer(self._server(name), timeout=self.timeout)
        if name.endswith("-start"):
            return ServerStart(self._server(name), timeout=self.timeout)
        return EngineProcess(self._engine(name), timeout=self.timeout)

    def _engine(self, name: str) -> Process:
        """Start the adapter of an engine."""
        length, options = _MODEL_LEN, dict[str, Any]()
        if peer_of(name) == "llama.cpp":
            python, module, model = self.folder.llama_cpp_python, "llama_cpp_engine", self.gguf
        elif peer_of(name) in PEERS:
            python, module, model = (
                self.folder.vllm_python,
                f"{name}_engine",
                self.folder.hf_directory,
            )
        else:
            python, module, model = Path(sys.executable), "paged_engine", self.gguf
            options = {"compilation_cache_dir": str(self.folder.caches / "paged")}
            if name == "paged-int8":
                options["quantization"] = "int8"
            if name == "paged-long":
                length, options["max_num_seqs"] = _LONG_MODEL_LEN, 16
        settings = Settings(str(model), len(self.cores), length, options)
        return self._process(name, [str(python), *engine_arguments(module, settings)], piped=True)

    def _server(self, name: str) -> StartServer:
        """Return what starts a server on a port."""
        options = ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", str(_MODEL_LEN)]
        if peer_of(name) == "vllm":
            python, module = str(self.folder.vllm_python), "vllm.entrypoints.cli.main"
            command = [python, "-m", module, "serve", str(self.folder.hf_directory), *options]
        else:
            command = [sys.executable, "-m", "paged.server.cli", "serve", str(self.gguf), *options]
            command += ["--compilation-cache-dir", str(self.folder.caches / "paged")]
        return lambda port: self._process(name, [*command, "--port", str(port)])

    def _process(self, name: str, command: list[str], *, piped: bool = False) -> Process:
        threads = str(len(self.cores))
        environment = {
            "PYTHONPATH": str(_ROOT),
            "OMP_NUM_THREADS": threads,
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(self.folder.caches / "vllm"),
            "VLLM_CPU_KVCACHE_SPACE": _VLLM_KV_GIB,
            # By default vLLM leaves out the second thread of a core.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cores)),
            "VLLM_NO_USAGE_STATS": "1",
        }
        return Process(
            command,
            cores=self.cores,
            environment=environment,
            folder=_ROOT,
            log=self.folder.logs / f"{name}.log",
            piped=piped,
        )
