"""Where a result goes: files that are named, and `--save-result`, which finds a name itself."""

import argparse
import datetime
import pathlib

from paged.server.cli_errors import UserError


def result_files(args: argparse.Namespace) -> list[pathlib.Path]:
    """Return the files that a run of `serve` writes its result to; makes `--result-dir`.

    Raises: UserError if the folder cannot be made, or is given for nothing.
    """
    files = [] if args.json is None else [args.json]
    if not args.save_result:
        for name in ("result_dir", "result_filename"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} needs --save-result.")
        return files
    folder = args.result_dir or pathlib.Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make --result-dir {folder}: {error.strerror}.") from None
    return [*files, folder / (args.result_filename or _file_name(args))]


def _file_name(args: argparse.Namespace) -> str:
    """Return a name that says what was run and when, as the reference's do."""
    if args.ramp_up_strategy is not None:
        rate = f"{args.ramp_up_strategy}-{args.ramp_up_start_rps:g}-{args.ramp_up_end_rps:g}"
    else:
        rate = f"{args.request_rate:g}"
    at_most = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"paged-{rate}qps{at_most}-{now}.json"
