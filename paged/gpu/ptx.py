"""What NVIDIA's assembler makes of a kernel: registers, spills, shared memory, machine code."""

import dataclasses
import functools
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile

# Of one multiprocessor, all of sm_80, sm_90 and sm_100. Source: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability".
_REGISTERS = 65_536
_WARPS = 64
_PROGRAMS = 32
# Registers are given out in units of 8 a thread; the system keeps 1 KB of shared memory a program.
_REGISTER_UNIT = 8
_SYSTEM_SHARED_BYTES = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel.

    Attributes:
      name: its entry point.
      registers: of a thread.
      spill_bytes: registers of a thread that are stored to memory for want of room.
      shared_bytes: shared memory of a program, static and dynamic.
      num_threads: of a program.
      ptx: its code before assembly.
      arch: what it is assembled for, as in "sm_90a".
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_threads: int
    ptx: str = dataclasses.field(repr=False)
    arch: str

    def machine_code(self) -> str:
        """Return its SASS, as text.

        Names to look for: HMMA, HGMMA and UTCHMMA are the tensor cores' products up to sm_80, on
        sm_90 and on sm_100; LDGSTS is an asynchronous copy into shared memory, UTMALDG one by TMA.
        """
        return _machine_code(self.ptx, self.arch)

    def count(self, instruction: str) -> int:
        """Return how often an instruction stands in the machine code, whatever its modifiers."""
        return len(re.findall(rf"\b{instruction}\b", self.machine_code()))

    def programs_per_multiprocessor(self, shared_bytes: int) -> int:
        """Return how many programs a multiprocessor with so much shared memory runs at a time."""
        warps = self.num_threads // 32
        registers = -(-self.registers // _REGISTER_UNIT) * _REGISTER_UNIT * self.num_threads
        return min(
            _REGISTERS // registers,
            _WARPS // warps,
            _PROGRAMS,
            shared_bytes // (self.shared_bytes + _SYSTEM_SHARED_BYTES),
        )


def inspect(ptx: str, name: str, shared_bytes: int = 0) -> Kernel:
    """Assemble a kernel and return what the assembler says of it.

    Args:
      ptx: the code.
      name: its entry point.
      shared_bytes: the shared memory that is asked for at launch, which the code does not tell.

    Raises:
      RuntimeError: if the code cannot be assembled; the message is the assembler's.
      FileNotFoundError: if there is no assembler.
    """
    target = re.search(r"\.target (sm_\w+)", ptx)
    if target is None:
        raise RuntimeError(f"the PTX of {name} has no line .target")
    with tempfile.TemporaryDirectory() as folder:
        log, _ = _assemble(ptx, target[1], pathlib.Path(folder))

    def number(pattern: str, text: str = log) -> int:
        return sum(map(int, re.findall(pattern, text)))

    return Kernel(
        name=name,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores"),
        shared_bytes=shared_bytes or number(r"(\d+) bytes smem"),
        num_threads=number(r"\.(?:req|max)ntid (\d+)", ptx),
        ptx=ptx,
        arch=target[1],
    )


@functools.cache
def find_tool(name: str) -> str:
    """Return the path of a CUDA tool: the one on PATH, else the one in Triton's wheel.

    Raises:
      FileNotFoundError: if there is neither.
    """
    site_packages = pathlib.Path(sysconfig.get_path("purelib"))
    bundled = site_packages / "triton" / "backends" / "nvidia" / "bin" / name
    found = shutil.which(name) or (str(bundled) if bundled.exists() else None)
    if found is None:
        raise FileNotFoundError(f"{name} is neither on PATH nor in an installed triton")
    return found


@functools.cache
def _machine_code(ptx: str, arch: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        _, binary = _assemble(ptx, arch, pathlib.Path(folder))
        tool = find_tool("cuobjdump")
        # It looks for nvdisasm on PATH.
        return _run(tool, "-sass", str(binary), path=str(pathlib.Path(tool).parent))


def _assemble(ptx: str, arch: str, folder: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Return what the assembler says, and where the machine code is."""
    source, binary = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    # Triton's wheel has an assembler of its own for sm_100 and later.
    tool = find_tool("ptxas-blackwell" if arch.startswith("sm_1") else "ptxas")
    log = _run(tool, "-v", f"-arch={arch}", str(source), "-o", str(binary))
    return log, binary


def _run(*command: str, path: str = "") -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": path}, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr
