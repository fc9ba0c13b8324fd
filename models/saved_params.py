"""`save_params` and `restore_params`: an engine's own parameters in a folder, by Orbax.

Names are the model's, shapes and types those of memory, so a start reads bytes and nothing else: no
names are translated, nothing is cut, dequantised or quantised. Each device reads its own slices.

Source: https://orbax.readthedocs.io (checkpoints of trees; tensors by TensorStore).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from paged.backends import release_freed_memory
from paged.models.errors import CheckpointError

# Of what is read at once: enough for the disk to be busy, little beside a model.
_BATCH_BYTES = 64 << 20


def save_params(params: nnx.State[Any, Any], directory: str | Path) -> None:
    """Write parameters, as `paged.models.load` returns them, into a new folder.

    Args:
      params: sharded or not; not packed for a CPU.
      directory: must not exist; it does not until all is written.

    Raises:
      CheckpointError: if it cannot be written.
    """
    tree = {parameter_name(path): leaf[...] for path, leaf in nnx.to_flat_state(params)}
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(Path(directory).absolute(), tree)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The parameters could not be written to {directory} ({_first_line(error)}); name a "
            "folder that does not exist, on a disk with room."
        ) from error


def restore_params(
    directory: str | Path,
    expected: nnx.State[Any, Any],
    *,
    shardings: Any = None,
    kv_head_copies: int = 1,
    progress: bool = True,
) -> nnx.State[Any, Any]:
    """Return the parameters that `save_params` wrote, cast to the types of `expected`.

    Args:
      directory: the folder.
      expected: shapes and types, see `abstract_model`; of kv heads there are `kv_head_copies`.
      shardings: tree of shardings like the parameters'; None puts all on the first device. A device
        reads only its own slices.
      kv_head_copies: how often each kv head is to be there, one after the other.
      progress: show a bar on standard error.

    Raises:
      CheckpointError: if parameters are missing, unexpected or of another shape or kind, which it
        lists, or if files are damaged.
    """
    folder = Path(directory).absolute()
    leaves = {parameter_name(path): leaf for path, leaf in nnx.to_flat_state(expected)}
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = jax.tree.leaves(shardings) or [device] * len(leaves)
    sharding_of = dict(zip(leaves, places, strict=True))
    with _checkpointer() as checkpointer:
        stored = _read_metadata(checkpointer, folder)
        axes = {name: _head_axis(leaf, kv_head_copies) for name, leaf in leaves.items()}
        _check(folder, stored, leaves, axes, kv_head_copies)
        # Copies of kv heads are made here, of few and small parameters that all devices read.
        wanted = {
            name: _abstract(
                stored[name].shape,
                leaf.dtype,
                sharding_of[name] if axes[name] is None else _everywhere(sharding_of[name]),
            )
            for name, leaf in leaves.items()
        }
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in wanted.values())
        restored: dict[str, jax.Array] = {}
        with tqdm(
            total=total, desc="Restoring weights", unit="B", unit_scale=True, disable=not progress
        ) as bar:
            for names in _batches(wanted):
                part = _restore(checkpointer, folder, {name: wanted[name] for name in names})
                for name in names:
                    array = part.pop(name)
                    bar.update(array.nbytes)
                    if (axis := axes[name]) is not None:
                        array = jnp.repeat(array, kv_head_copies, axis=axis)
                        array = jax.device_put(array, sharding_of[name])
                    restored[name] = array
                    del array
                del part
                release_freed_memory()
    params: nnx.State[Any, Any] = jax.tree.unflatten(
        jax.tree.structure(expected), [restored[name] for name in leaves]
    )
    return params


def parameter_name(path: tuple[Any, ...]) -> str:
    """Return the dotted name of a parameter, such as "layers.0.mlp.up_proj.weight"."""
    return ".".join(map(str, path))


def _checkpointer() -> Any:
    # Imported here: it takes most of a second, and most starts need none of it.
    import orbax.checkpoint as ocp

    # Weights hardly compress, and decompressing them takes longer than reading them.
    return ocp.PyTreeCheckpointer(use_compression=False)


def _read_metadata(checkpointer: Any, folder: Path) -> Mapping[str, Any]:
    try:
        metadata = checkpointer.metadata(folder).item_metadata
        tree = None if metadata is None else metadata.tree
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(folder, error) from error
    if not tree:
        raise _damaged(folder, "it has no metadata")
    parameters: Mapping[str, Any] = tree
    return parameters


def _restore(checkpointer: Any, folder: Path, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    arguments = ocp.args.PyTreeRestore(
        item=wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
    )
    try:
        arrays: dict[str, jax.Array] = checkpointer.restore(folder, args=arguments)
        jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(folder, error) from error
    return arrays


def _check(
    folder: Path,
    stored: Mapping[str, Any],
    expected: Mapping[str, Any],
    axes: Mapping[str, int | None],
    copies: int,
) -> None:
    misfits = []
    for name, leaf in expected.items():
        if (actual := stored.get(name)) is None:
            continue
        shape, axis = list(leaf.shape), axes[name]
        if axis is not None:
            shape[axis] //= copies
        if list(actual.shape) != shape or not _can_cast(actual.dtype, leaf.dtype):
            misfits.append(
                f"{name} {list(actual.shape)} {np.dtype(actual.dtype)} instead of {shape} "
                f"{leaf.dtype}"
            )
    problems = {
        "missing": [name for name in expected if name not in stored],
        "unexpected": [name for name in stored if name not in expected],
        "of another shape or dtype": misfits,
    }
    if any(problems.values()):
        listed = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
        raise CheckpointError(
            f"the parameters in {folder} do not fit the config beside them; {'; '.join(listed)}. "
            "Run `paged convert` again, or correct the config."
        )


def _can_cast(stored: Any, wanted: Any) -> bool:
    floats = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
    return np.dtype(stored) == wanted or (np.dtype(stored) in floats and wanted in floats)


def _abstract(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _head_axis(leaf: Any, copies: int) -> int | None:
    """Return the axis of a parameter along which kv heads are copied, if there is one."""
    axes = leaf.get_metadata("out_sharding")
    return axes.index("kv_heads") if copies > 1 and "kv_heads" in axes else None


def _everywhere(sharding: Any) -> jax.sharding.Sharding:
    everywhere = jax.sharding.PartitionSpec()  # type: ignore[no-untyped-call]
    return jax.sharding.NamedSharding(sharding.mesh, everywhere)


def _batches(wanted: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield names of parameters of about `_BATCH_BYTES` together."""
    names: list[str] = []
    num_bytes = 0
    for name, leaf in wanted.items():
        names.append(name)
        num_bytes += leaf.size * leaf.dtype.itemsize
        if num_bytes >= _BATCH_BYTES:
            yield names
            names, num_bytes = [], 0
    if names:
        yield names


def _damaged(folder: Path, reason: Exception | str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: damaged parameters ({_first_line(reason)}); run `paged convert` again."
    )


def _first_line(reason: Exception | str) -> str:
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0][:200]
