"""`paged build-native`: compiles the C++ kernels ahead of the first start that needs them."""

import argparse
import sys

from paged.server.cli_errors import UserError
from paged.server.cli_settings import native_cache_dir, set_up_logging


def run(args: argparse.Namespace) -> int:
    """Build, load and test the kernels, print where they are and what they use; return 0.

    Raises: UserError if there is no compiler, or it fails, or the kernels compute something else.
    """
    set_up_logging("warning")
    # Imported here: JAX takes seconds.
    from paged.native.build import BuildError, build_library
    from paged.native.library import LEVELS, best_level, load_library

    folder = native_cache_dir(args)
    print(f"Building the native CPU kernels in {folder} ...", file=sys.stderr, flush=True)
    try:
        path = build_library(folder, progress=sys.stderr.isatty())
    except BuildError as error:
        raise UserError(f"the native CPU kernels cannot be built: {error}.") from None
    if reason := load_library(folder):
        raise UserError(f"{path} cannot be used: {reason}.")
    print(f"{path}\ninstructions: {LEVELS[best_level()]}")
    return 0
