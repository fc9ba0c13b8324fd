"""`load_library`: build, load, register with XLA and test the native kernels, once per process."""

import ctypes
import logging
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np

from paged.native import attention, expert_linear, kv_write, linear
from paged.native.build import BuildError, build_library
from paged.native.linear import DTYPES, PackedWeight, pack, packed_linear
from paged.native.self_test import attention_failure

logger = logging.getLogger(__name__)

LEVELS = ("portable", "avx2", "avx512_bf16")
"""Instruction sets that the kernels are compiled for, from the least to the best."""

# Names that XLA knows the handlers by, which are also the names of the library's symbols.
_TARGETS = (
    linear.TARGET,
    linear.BEST_TARGET,
    linear.ROWS_TARGET,
    expert_linear.TARGET,
    attention.TARGET,
    kv_write.WRITE_TARGET,
    kv_write.ROTATE_TARGET,
)

_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None


def resolve_linear_backend(
    requested: str,
    platform: str,
    dtype: str,
    *,
    cache_dir: str | pathlib.Path,
    progress: bool = False,
) -> str:
    """Return "native" or "xla"; "native" is loaded and ready to be called.

    "auto" takes the native kernels on a CPU if they have the element type and can be built; if they
    cannot, one warning says why and what is lost.

    Args:
      requested: "auto", "native" or "xla".
      platform: a JAX platform name, see `paged.backends.current_platform`.
      dtype: element type of weights and activations.
      cache_dir: folder of the built library, see `build_library`.
      progress: show a bar on standard error while compiling.

    Raises:
      ValueError: "native" is asked for and cannot be had; the message gives the reason.
    """
    if requested == "xla":
        return "xla"
    reason = None
    if platform != "cpu":
        reason = f"it runs on cpu, not on {platform}"
    elif dtype not in DTYPES:
        reason = f"it computes in {' or '.join(DTYPES)}, not in {dtype}"
    if reason is None:
        reason = load_library(cache_dir, progress=progress)
        if reason is None:
            return "native"
        if requested == "auto":
            logger.warning(
                "No native CPU kernels: %s. Linear layers run on XLA, which is slower, several "
                "times so for few sequences; linear_backend=xla silences this.",
                reason,
            )
    if requested == "native":
        raise ValueError(f"linear_backend='native' is unavailable: {reason}; or use 'auto'.")
    return "xla"


def load_library(cache_dir: str | pathlib.Path, *, progress: bool = False) -> str | None:
    """Make the native kernels callable; return None, or why they are not.

    What was loaded once stays loaded.

    Args:
      cache_dir: folder of the built library, see `build_library`.
      progress: show a bar on standard error while compiling.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            return None
        try:
            library = _register(build_library(cache_dir, progress=progress))
        except (BuildError, OSError) as error:
            return str(error)
        failure = self_test()
        if failure is None:
            _loaded = library
            logger.info("Native CPU kernels: %s.", LEVELS[library.paged_best_level()])
        return failure


def not_loaded() -> str | None:
    """Return why the kernels cannot be called at the moment, or None if they can."""
    if _loaded is None:
        return "its kernels are not loaded; call paged.native.library.load_library() first"
    return None


def best_level() -> int:
    """Return the index in `LEVELS` of the best instruction set of this CPU.

    Raises:
      RuntimeError: before `load_library`.
    """
    if _loaded is None:
        raise RuntimeError("Call load_library() first: the native kernels are not loaded.")
    return int(_loaded.paged_best_level())


def self_test() -> str | None:
    """Return how the kernels differ from numpy on small arrays, or None if they do not."""
    rng = np.random.default_rng(0)
    for dtype, weight_dtype, tolerance in (
        ("float32", "float32", 1e-4),
        ("bfloat16", "bfloat16", 5e-2),
        ("bfloat16", "int8", 5e-2),
    ):
        x = np.asarray(jnp.asarray(rng.standard_normal((7, 67)), dtype))
        # Of int8 all values but -128, which is none.
        is_int8, scale = weight_dtype == "int8", 1 / 64
        numbers = rng.integers(-127, 128, (70, 67)) * (1.0 if is_int8 else scale)
        weight = np.asarray(jnp.asarray(numbers, weight_dtype))
        scales = np.full(70, scale, np.float32) if is_int8 else None
        expected = x.astype(np.float64) @ weight.astype(np.float64).T * (scale if is_int8 else 1)
        try:
            packed = PackedWeight(pack(weight), 70, scales)
            (y,) = packed_linear(x, [packed], out_dtype="float32")
            error = float(np.abs(np.asarray(y) - expected).max())
        except jax.errors.JaxRuntimeError as failure:
            return f"the self-test failed: {failure}"
        if not error <= tolerance:
            return f"the self-test failed: {weight_dtype} products are off by {error:.3g}"
    try:
        reason = attention_failure()
    except jax.errors.JaxRuntimeError as failure:
        reason = str(failure)
    return reason and f"the self-test failed: {reason}"


def _register(path: pathlib.Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for target in _TARGETS:
        capsule = jax.ffi.pycapsule(getattr(library, target))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    return library
