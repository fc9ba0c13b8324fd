"""`paged bench sweep`: one load after the other on a server, or one server after the other."""

import argparse
import contextlib
import datetime
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from paged.server.bench_page import render
from paged.server.bench_report import check_writable, versions, write_json, write_text
from paged.server.bench_server import started_server
from paged.server.bench_serving import lines_of, measure, result_of
from paged.server.bench_sweep import Point, best_goodput, charts, combinations, knees, table
from paged.server.cli_bench_serve import print_failures
from paged.server.cli_bench_serve_options import DEFAULT_BASE_URL, add_serve_options
from paged.server.cli_errors import UserError
from paged.server.text_table import aligned

_OF_SERVER = "serve "  # before the names of a server's options


def run(args: argparse.Namespace) -> int:
    """Measure every point, print and write the table; return 0, or 130 after Ctrl-C.

    A point at which no request succeeds is reported and the sweep goes on.

    Raises: UserError if an option cannot be varied, a server does not start, no point succeeds or
      a file cannot be written.
    """
    check_writable(args.json)
    check_writable(args.html)
    _check(args)
    loads = combinations(args.vary)
    # All are parsed before the first is measured.
    varied = [_with_values(args, load) for load in loads]
    points: list[Point] = []
    complete = True
    for server in combinations(args.vary_server):
        with _server(args, server) as url:
            for load, point_args in zip(loads, varied, strict=True):
                point_args.base_url = url
                # Other content at every point: what one leaves in a prefix cache is of no use.
                point_args.seed = args.seed + len(points)
                values = load | {_OF_SERVER + name: value for name, value in server.items()}
                shown = " ".join(f"{name}={value}" for name, value in values.items())
                print(f"{shown or url} ...", file=sys.stderr)
                point, complete = _point(point_args, values)
                points.append(point)
                if not complete:
                    break
        if not complete:
            break
    _report(args, points)
    return 0 if complete else 130


def _check(args: argparse.Namespace) -> None:
    """Raise UserError for options that contradict each other."""
    if not (args.vary or args.vary_server):
        raise UserError("nothing to vary; add --vary request-rate=1,2,4, for example.")
    names = [name for name, _ in args.vary]
    names += [_OF_SERVER + name for name, _ in args.vary_server]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is varied twice; give all its values at once.")
    starts = args.serve_args is not None or args.vary_server
    if starts and (args.host is not None or args.port is not None):
        raise UserError(
            "--host and --port name a running server, --serve-args and --vary-server start one; "
            "leave one of them out."
        )
    if starts and args.base_url != DEFAULT_BASE_URL:
        raise UserError(
            f"--base-url {args.base_url} names a running server, --serve-args and --vary-server "
            "start one; give one or the other."
        )


class _ValueParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"--vary: {message}")


def _with_values(args: argparse.Namespace, values: Mapping[str, str]) -> argparse.Namespace:
    """Return the options with some of them replaced. Raises: UserError if there are none such."""
    parser = _ValueParser(add_help=False, allow_abbrev=False)
    add_serve_options(parser)
    texts = [f"--{name}={value}" for name, value in values.items()]
    return parser.parse_args(texts, argparse.Namespace(**vars(args)))


@contextlib.contextmanager
def _server(args: argparse.Namespace, values: Mapping[str, str]) -> Any:
    """Yield the address of the server to measure; start it if one is to be started."""
    if args.serve_args is None and not values:
        yield args.base_url
        return
    options = [f"--{name}={value}" for name, value in values.items()]
    print(f"Starting paged serve {' '.join(options)} ...", file=sys.stderr)
    with started_server(args.serve_args or "", options, args.startup_timeout) as url:
        yield url


def _point(args: argparse.Namespace, values: Mapping[str, str]) -> tuple[Point, bool]:
    """Return what was measured, and whether nobody interrupted it."""
    try:
        measurement = measure(args)
    except UserError as error:  # the points before it shall not be lost
        return {"values": values, "error": str(error)}, True
    if not measurement.done:
        first = next(iter(measurement.errors), "interrupted")
        return {"values": values, "error": " ".join(first.split())}, measurement.complete
    print_failures(measurement)
    return {"values": values, **result_of(args, measurement)}, measurement.complete


def _report(args: argparse.Namespace, points: list[Point]) -> None:
    if all("error" in point for point in points):
        raise UserError(f"no request succeeded at any point: {points[0]['error']}")
    axis = args.vary[0][0] if args.vary else _OF_SERVER + args.vary_server[0][0]
    found = knees(points, axis)
    rows = table(points, found)
    print(aligned(rows))
    best = best_goodput(points)
    if best is not None:
        where = ", ".join(f"{name} {value}" for name, value in best["values"].items())
        print(f"Highest goodput: {best['request_goodput']:.2f} requests per second at {where}")
    result = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        **dict(args.metadata),
        "settings": {
            "vary": dict(args.vary),
            "vary_server": dict(args.vary_server),
            "serve_args": args.serve_args,
        },
        "points": points,
        "knees": [point["values"] for point in found],
        "versions": versions(),
    }
    write_json(args.json, result)
    good = next(point for point in points if "error" not in point)
    knee = found[0] if len(found) == 1 else None
    write_text(
        args.html,
        lambda: render(
            f"{good['model_id']}: {', '.join(name for name in points[0]['values'])}",
            {} if knee is None else {"Knee": str(knee["values"][axis]), **lines_of(dict(knee))},
            [("Points", list(rows[0]), [list(cells.values()) for cells in rows])],
            charts(points, axis, knee),
            result | {"settings": result["settings"] | {"load": good["settings"]}},
        ),
    )
