"""`qwen-ray run` as the entry point of a Ray job: it joins the cluster that it was submitted to.

    ray job submit --address http://HEAD:8265 -- python -m jobs.caption s3://bucket/in s3://bucket/out --preset NAME

Arguments and exit codes are those of `qwen-ray run`, and the job fails where the run does. `ray job stop` sends
SIGTERM: what is finished is committed, and the same command goes on from there.
"""

from __future__ import annotations

import sys

import typer

from qwen_ray import cli

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(cli.run)


def main() -> None:
    """Like `qwen-ray run`, with `--address auto` unless the arguments name another address."""
    cli.main(app, ["--address", "auto", *sys.argv[1:]])  # of two addresses the last one counts


if __name__ == "__main__":
    main()
