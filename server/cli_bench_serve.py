"""`paged bench serve`: a server under load, as its clients see it."""

import argparse
import sys

from paged.server.bench_files import result_files
from paged.server.bench_page import run_page
from paged.server.bench_report import check_writable, print_report, write_json, write_text
from paged.server.bench_serving import Measurement, detailed_fields, lines_of, measure, result_of

# Different messages of failed requests that are shown.
_MAX_SHOWN_ERRORS = 5


def run(args: argparse.Namespace) -> int:
    """Send the load, print and write the result; return 0, or 130 if Ctrl-C ended it early.

    Raises: UserError if the server cannot be used, no request succeeds or a file cannot be
      written.
    """
    files = result_files(args)
    for file in (*files, args.html):
        check_writable(file)
    measurement = measure(args)
    measurement.check()
    result = result_of(args, measurement, percentiles=args.metric_percentiles)
    print_report(
        "Serving Benchmark Result",
        lines_of(result),
        measurement.done,
        metrics=args.percentile_metrics,
        percentiles=args.metric_percentiles,
    )
    print_failures(measurement)
    if args.save_detailed:
        result |= detailed_fields(measurement.timelines)
    for file in files:
        write_json(file, result)
        if file != args.json:
            print(f"Written to {file}.", file=sys.stderr)
    title = f"{args.model} at {args.base_url}"
    write_text(
        args.html,
        lambda: run_page(
            title,
            lines_of(result),
            result,
            measurement.timelines,
            percentiles=args.metric_percentiles,
        ),
    )
    return 0 if measurement.complete else 130


def print_failures(measurement: Measurement) -> None:
    """Say on stderr why requests failed, and how many Ctrl-C left unfinished."""
    errors = measurement.errors
    for message, count in errors.most_common(_MAX_SHOWN_ERRORS):
        print(f"{count} failed: {' '.join(message.split())}", file=sys.stderr)
    if not measurement.complete:
        left = len(measurement.timelines) - len(measurement.done) - errors.total()
        print(f"Interrupted: {left} requests were not finished.", file=sys.stderr)
