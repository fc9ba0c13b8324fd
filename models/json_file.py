"""Reading the JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from paged.models.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an absent file gives an empty one.

    Raises:
      CheckpointError: if the file cannot be read or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as JSON ({error}); fetch the checkpoint again."
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object; fetch the checkpoint again.")
    return value
