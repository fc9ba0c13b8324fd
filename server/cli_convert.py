"""`paged convert`: a checkpoint in the engine's own format."""

import argparse
import sys

from paged.server.cli_errors import user_errors
from paged.server.cli_settings import models_cache_dir, set_up_logging


def run(args: argparse.Namespace) -> int:
    """Write the folder, print its name and return 0.

    Raises: UserError for what the user can mend.
    """
    set_up_logging(args.log_level)
    # Imported here: JAX takes seconds.
    from paged.models.checkpoint import open_checkpoint
    from paged.models.convert import convert_checkpoint

    with user_errors():
        checkpoint = open_checkpoint(
            args.model,
            revision=args.revision,
            token=args.hf_token,
            cache_dir=models_cache_dir(),
        )
        convert_checkpoint(
            checkpoint,
            args.out.expanduser(),
            dtype=args.dtype,
            quantization=args.quantization,
            progress=sys.stderr.isatty(),
        )
    print(args.out)
    return 0
