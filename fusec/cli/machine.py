"""``fusec machine``: the profile of this machine, used for predicted times and grouping."""

import os
from typing import TYPE_CHECKING

import typer

from fusec.cli.options import Json
from fusec.cli.terminal import note, reports, show, write_json

if TYPE_CHECKING:
    from fusec.analysis.machine import Machine
    from fusec.config import Config

machine = typer.Typer(
    no_args_is_help=True,
    help="Measure this machine, or show the profile that compiles use.",
)


@machine.command(name="show")
@reports
def show_machine(as_json: Json = False) -> None:
    """Show the figures that compiles go by."""
    from fusec.analysis.machine import Machine, cpu_name
    from fusec.cli.listings import kept_data
    from fusec.config import Config, compiler_command

    config = Config.from_environment()
    profiles = (path.read_text(errors="replace") for path in sorted(config.cache_path().glob("machine-*.json")))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = (os.environ.get(f"{library}_NUM_THREADS", "") for library in ("OMP", "MKL"))
    parts = ["machine", repr(config), cpu_name(), str(cores), *threads, *compiler_command(), *profiles]
    _write(Machine.from_json(kept_data(parts, config, lambda: _machine(config).to_json())), as_json)


def _machine(config: "Config") -> "Machine":
    from fusec.codegen import target_named

    return target_named("cpp").machine(config)


@machine.command()
@reports
def measure(as_json: Json = False) -> None:
    """Measure this machine for a few seconds, and store its profile for all later compiles."""
    from rich.console import Console
    from rich.progress import Progress

    from fusec.analysis.machine import store_machine
    from fusec.config import Config
    from fusec.debug.measurement import STEPS, measure_machine

    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 1:
        note(f"other processes keep the machine busy (load {os.getloadavg()[0]:.1f}): measure it again when it is idle")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(STEPS))
        found = measure_machine(
            step=lambda name: bar.update(task, description=name, completed=STEPS.index(name), refresh=True)
        )
    path = store_machine(found, Config.from_environment())
    _write(found, as_json)
    note(f"written to {path}")


@machine.command()
@reports
def forget(as_json: Json = False) -> None:
    """Remove the profile of this processor: compiles assume a modest one again."""
    import torch

    from fusec.analysis.machine import profile_path
    from fusec.config import Config

    path = profile_path(Config.from_environment(), torch.get_num_threads())
    there = path.exists()
    path.unlink(missing_ok=True)
    if as_json:
        write_json({"removed": str(path) if there else None})
    else:
        typer.echo(f"removed {path}" if there else f"nothing to remove: {path} does not exist")


def _write(found: "Machine", as_json: bool) -> None:
    from fusec.debug.machine_table import machine_table

    if as_json:
        write_json(found.to_json())
    else:
        show(machine_table(found))
