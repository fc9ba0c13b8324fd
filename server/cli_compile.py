"""`paged compile`: exports the programs of a step, so that a server starts without tracing."""

import argparse
import os
import sys

from paged.server.cli_errors import UserError, user_errors
from paged.server.cli_settings import engine_config, models_cache_dir, set_up_logging


def run(args: argparse.Namespace) -> int:
    """Write the artifact and return 0.

    Raises: UserError for what the user can mend.
    """
    set_up_logging(args.log_level)
    with user_errors():
        config = engine_config(args)
    if config.artifact is not None:
        raise UserError("--artifact is for the commands that load one; --out names a new one.")
    if args.gpu is not None:
        # Before JAX is imported: the GPU is absent, and so may be CUDA's libraries.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    # Imported here: JAX takes seconds.
    from paged.scheduler.exporting import compile_artifact

    try:
        with user_errors():
            compile_artifact(
                args.model,
                config,
                args.out,
                gpu=args.gpu,
                progress=sys.stderr.isatty(),
                revision=args.revision,
                token=args.hf_token,
                models_cache_dir=models_cache_dir(),
            )
    except RuntimeError as error:  # JAX's CUDA plugin is missing
        raise UserError(str(error)) from error
    print(args.out)
    return 0
