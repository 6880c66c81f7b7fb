"""The command line. Turns flags into a `JobConfig` and results into tables; decides nothing itself."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from qwen_ray import api
from qwen_ray.config import PRESETS, JobConfig, from_dict, to_yaml
from qwen_ray.errors import ConfigError, LeaseLostError, QwenRayError

STOP_S = 20.0
"""Longest time from a signal to the end. Spot instances give 30 s to 2 minutes."""
GOES_ON = "The same command goes on from there"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
out, err = Console(), Console(stderr=True)

Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT", help="File, folder, glob, s3:// prefix, or a CSV, JSONL or Parquet manifest with a uri column."
    ),
]
Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder or s3:// prefix of the tables.")]
PresetOption = Annotated[
    str, typer.Option("--preset", help="Named configuration to start from: tiny, qwen2.5-vl-7b, ...")
]
ConfigOption = Annotated[str, typer.Option("--config", help="YAML or JSON file laid over the preset.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="One value, path=value; may be repeated.")]
PromptOption = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="Name of a template, a .yaml or .txt file, or the text; may be repeated."),
]
LimitOption = Annotated[int, typer.Option("--limit", help="Take only the first N inputs.")]
EndpointOption = Annotated[str, typer.Option("--endpoint-url", help="S3 endpoint of a store other than AWS.")]
AddressOption = Annotated[str, typer.Option("--address", help="Ray cluster to join; by default one is started here.")]
MaxHoursOption = Annotated[
    float, typer.Option("--max-hours", help="Stop after so many hours; what is finished is committed (exit code 3).")
]
MaxCostOption = Annotated[
    float, typer.Option("--max-cost", help="Stop at this cost; budget.gpu_hour_price says what a GPU's hour costs.")
]
GpusOption = Annotated[int, typer.Option("--gpus", help="Wait until the cluster has so many GPUs, asking for them.")]
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Take models from folders and caches alone; see `qwen-ray fetch`.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.command()
def run(
    input: Input,
    output: Output,
    preset: PresetOption = "",
    config: ConfigOption = "",
    set: SetOption = None,
    prompt: PromptOption = None,
    limit: LimitOption = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    endpoint_url: EndpointOption = "",
    address: AddressOption = "",
    max_hours: MaxHoursOption = 0.0,
    max_cost: MaxCostOption = 0.0,
    gpus: GpusOption = 0,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Caption and transcribe INPUT into tables under OUTPUT. Run it again at any time: it goes on where it stopped."""
    job = _offline(_job(input, output, preset, config, set, prompt, limit, endpoint_url, address), offline)
    job = _bounded(job, max_hours, max_cost, gpus)
    if dry_run:
        _show_plan(job, as_json)
    else:
        _execute(job, as_json=as_json, retry=False)


@app.command()
def plan(
    input: Input = "",
    output: Output = "",
    preset: PresetOption = "",
    config: ConfigOption = "",
    set: SetOption = None,
    prompt: PromptOption = None,
    limit: LimitOption = 0,
    endpoint_url: EndpointOption = "",
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the whole configuration as YAML, which --config takes.")
    ] = False,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what `run` would do, and do none of it."""
    job = _offline(_job(input, output, preset, config, set, prompt, limit, endpoint_url, ""), offline)
    if show_config:
        typer.echo(to_yaml(job), nl=False)
    else:
        _show_plan(job, as_json)


@app.command()
def retry(
    output: Output,
    endpoint_url: EndpointOption = "",
    address: AddressOption = "",
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Try every failed or partial video of OUTPUT again, with the configuration of its last run."""
    values = api.last_config(output, endpoint_url)
    job = from_dict(values | {"address": address})
    _execute(_offline(_with_endpoint(job, endpoint_url), offline), as_json=as_json, retry=True)


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, s3:// prefix, or folder of a checkpoint.")],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of the hub.")] = "",
    cache_dir: Annotated[str, typer.Option(help="Where to keep it; as weights.cache_dir of the run.")] = "",
    endpoint_url: EndpointOption = "",
    as_json: JsonOption = False,
) -> None:
    """Download MODEL into this machine's cache and verify it, so that a run finds it there, also with --offline."""
    from qwen_ray import screens

    with screens.byte_progress(model) as show:
        found = api.fetch_model(model, revision, endpoint_url=endpoint_url, cache_dir=cache_dir, on_progress=show)
    if as_json:
        _print_json({"location": found.location, "revision": found.revision, "size_bytes": found.size_bytes})
    else:
        screens.show_model(out, found)


@app.command()
def status(output: Output, endpoint_url: EndpointOption = "", as_json: JsonOption = False) -> None:
    """Show what OUTPUT holds, and who is writing to it."""
    found = api.status(output, endpoint_url)
    if as_json:
        _print_json(found)
    else:
        from qwen_ray import screens

        screens.show_status(out, found)


@app.command()
def verify(output: Output, endpoint_url: EndpointOption = "", as_json: JsonOption = False) -> None:
    """Check every promise about the tables of OUTPUT; exit code 1 when one is broken."""
    problems = api.verify(output, endpoint_url=endpoint_url)
    if as_json:
        _print_json({"ok": not problems, "problems": problems})
    elif problems:
        for problem in problems:
            err.print(f"[red]{problem['code']}[/red] {problem['message']}", highlight=False)
    else:
        out.print("ok: every promise about these tables holds")
    raise typer.Exit(1 if problems else 0)


@app.command()
def probe(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A video file.")],
    endpoint_url: EndpointOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show what is known of a FILE without looking at its pictures: true duration, frames, tracks, offsets."""
    info = api.probe(file, endpoint_url=endpoint_url).to_dict()
    if as_json:
        _print_json(info)
    else:
        from qwen_ray import screens

        screens.show_info(out, file, info)


@app.command()
def frames(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A video file.")],
    start: Annotated[float, typer.Option(help="Start of the clip in seconds.")],
    end: Annotated[float, typer.Option(help="End of the clip in seconds.")],
    directory: Annotated[Path, typer.Option("--out", help="Folder for the PNG files and frames.json.")],
    preset: PresetOption = "",
    config: ConfigOption = "",
    set: SetOption = None,
    endpoint_url: EndpointOption = "",
) -> None:
    """Write exactly the frames that the model would see of one clip, in order, and their times."""
    job = _with_endpoint(api.configure("", "", preset=preset or "tiny", config=config, set=set or []), endpoint_url)
    paths = api.save_frames(file, start, end, directory, job)
    out.print(f"{len(paths)} frames and frames.json in {directory}", highlight=False)


@app.command()
def subtitles(
    output: Output,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the .srt files.")],
    endpoint_url: EndpointOption = "",
) -> None:
    """Write one .srt file per video of OUTPUT that has a sound track."""
    for path in api.subtitles(output, directory, endpoint_url):
        typer.echo(path)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--out", help="Folder for the tables and subtitles.")] = Path("demo-output"),
) -> None:
    """Caption and transcribe the sample videos that ship with the package, and show the result."""
    from qwen_ray import screens

    job = api.configure(str(api.SAMPLES), str(output / "tables"), preset="tiny")
    _execute(job, as_json=False, retry=False, leave=False)
    paths = api.subtitles(str(output / "tables"), output / "subtitles", "")
    screens.show_clips(out, str(output / "tables"))
    screens.show_paths(out, output / "tables", paths)


def main(command: typer.Typer = app, arguments: Sequence[str] | None = None) -> None:
    """Entry point: every error that a user can cause is one sentence and an exit code.

    Args:
        command: what to run.
        arguments: its words; by default those of the process.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # preemption stops like Ctrl-C: what is done is kept
        signal.signal(number, _interrupt)
    try:
        command(arguments)
    except (ConfigError, LeaseLostError) as error:
        _fail(str(error), 2)
    except QwenRayError as error:
        _fail(str(error), 1)
    except OSError as error:  # a file that the user named: an output folder that is a file, a full disk
        _fail(f"{error.filename or 'this machine'}: {error.strerror or error}", 2)


def _interrupt(*_: object) -> None:
    """Stop, and be over soon: whoever stops us, a spot market or a scheduler, kills what lingers."""
    last = threading.Timer(STOP_S, _give_up)
    last.daemon = True
    last.start()
    raise KeyboardInterrupt


def _give_up() -> None:
    """The store or the cluster does not answer. What is on its way is settled by the next run."""
    print(f"error: stopped; not everything could be committed within {STOP_S:g} s. {GOES_ON}", file=sys.stderr)
    os._exit(130)


def _job(
    input: str,
    output: str,
    preset: str,
    config: str,
    assignments: list[str] | None,
    prompts: list[str] | None,
    limit: int,
    endpoint_url: str,
    address: str,
) -> JobConfig:
    if not preset and not config:
        raise ConfigError(f"say which models to run: --preset or --config; presets: {', '.join(PRESETS)}")
    job = api.configure(input, output, preset=preset, config=config, set=assignments or [], prompts=prompts or [])
    job = dataclasses.replace(job, limit=limit or job.limit, address=address or job.address)
    return _with_endpoint(job, endpoint_url)


def _with_endpoint(job: JobConfig, endpoint_url: str) -> JobConfig:
    if not endpoint_url:
        return job
    return dataclasses.replace(job, storage=dataclasses.replace(job.storage, endpoint_url=endpoint_url))


def _offline(job: JobConfig, offline: bool) -> JobConfig:
    return dataclasses.replace(job, weights=dataclasses.replace(job.weights, offline=offline or job.weights.offline))


def _bounded(job: JobConfig, max_hours: float, max_cost: float, gpus: int) -> JobConfig:
    budget = job.budget
    hours, cost = max_hours or budget.max_hours, max_cost or budget.max_cost
    return dataclasses.replace(
        job, budget=dataclasses.replace(budget, max_hours=hours, max_cost=cost), gpus=gpus or job.gpus
    )


def _show_plan(job: JobConfig, as_json: bool) -> None:
    planned = api.plan(job)
    if as_json:
        _print_json(planned)
    else:
        from qwen_ray import screens

        screens.show_plan(out, planned)


def _execute(job: JobConfig, *, as_json: bool, retry: bool, leave: bool = True) -> None:
    from qwen_ray import screens
    from qwen_ray.runner import run as execute

    try:
        # What Ray itself prints must not get between the JSON and whoever reads it.
        with redirect_stdout(sys.stderr), screens.live_progress() as on_progress:
            report = execute(job, on_progress=on_progress, retry=retry)
    except KeyboardInterrupt:
        _fail(f"stopped; what was finished is committed. {GOES_ON}", 130)
    if as_json:
        _print_json(report.to_dict())
    else:
        screens.show_report(out, report)
    if leave or report.exit_code:
        sys.exit(report.exit_code)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _fail(message: str, code: int) -> NoReturn:
    err.print(f"[bold red]error:[/bold red] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(code)
