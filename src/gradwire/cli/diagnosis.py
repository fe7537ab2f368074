"""The command `gradwire doctor`: in front of a training command, or inside its processes."""

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradwire.errors import ConfigError

_IN_JOB = ("RANK", "WORLD_SIZE")
"""Variables that every launcher sets for its processes."""


def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="A torchrun command; inside a job the script.", show_default=False),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="The script is the name of a module.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time for measuring, about.")] = 120.0,
) -> None:
    """Measures a training job: links, exposed communication, and what each method would gain.

    `gradwire doctor -- torchrun --nproc-per-node 2 train.py` starts the command with this one in
    front of the script, as in `torchrun --nproc-per-node 2 -m gradwire doctor train.py`, which
    works under any launcher that sets RANK and WORLD_SIZE. The script trains as usual, but with
    steps without exchange among others, so its results are worthless; it ends when all has been
    measured. Without a script only the links are measured.
    """
    if not seconds > 0:
        raise ConfigError(f"doctor: seconds must be positive, got {seconds:g}")
    words = command or []
    if all(name in os.environ for name in _IN_JOB):
        if words:
            _watch_script(words, module, seconds)
        else:
            _print_links()
        return
    if not words:
        raise ConfigError(
            "doctor: expected a training command, such as: gradwire doctor -- torchrun "
            "--nproc-per-node 2 train.py"
        )
    launched = with_doctor(words, seconds)
    try:
        os.execvp(launched[0], launched)
    except OSError as error:
        raise ConfigError(f"doctor: cannot run {launched[0]!r}: {error.strerror}") from error


def with_doctor(command: list[str], seconds: float) -> list[str]:
    """Returns a torchrun command in which `python -m gradwire doctor` runs the script."""
    from torch.distributed.run import get_args_parser

    name = Path(command[0]).name
    if name.startswith("python") and command[1:3] == ["-m", "torch.distributed.run"]:
        launcher, arguments = command[:3], command[3:]
    elif name == "torchrun":
        launcher, arguments = command[:1], command[1:]
    else:
        raise ConfigError(
            f"doctor: cannot put itself into {name!r}, only into torchrun; under any other "
            "launcher start your script as: python -m gradwire doctor train.py"
        )
    parsed = get_args_parser().parse_args(arguments)
    if parsed.no_python:
        raise ConfigError("doctor: --no-python starts a program that is no Python script")
    # The script's own arguments follow its name; torchrun's options come before it.
    count = len(arguments) - len(parsed.training_script_args) - 1
    options, script = arguments[:count], arguments[count:]
    own = ["doctor", f"--seconds={seconds:g}"]
    if parsed.module:
        options = [option for option in options if option not in ("-m", "--module")]
        own.append("--module")
    return [*launcher, *options, "-m", "gradwire", *own, *script]


def _watch_script(words: list[str], module: bool, seconds: float) -> None:
    """Runs the script in this process until it has been measured, and prints the diagnosis."""
    import torch.distributed as dist

    from gradwire.perfmodel.doctor import diagnose
    from gradwire.perfmodel.step_watch import MeasurementDone, StepWatch

    watch = StepWatch(seconds)
    watch.install()
    try:
        _run_script(words, module)
    except MeasurementDone:
        watch.close()
        assert watch.result is not None
        if dist.get_rank() == 0:
            print(f"\n{diagnose(watch.result)}", flush=True)
        # Other ranks may still be reading from this one.
        dist.barrier()
        dist.destroy_process_group()
        return
    raise ConfigError(_too_short(words[0], watch.steps))


def _run_script(words: list[str], module: bool) -> None:
    sys.argv = words
    if module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    if not Path(words[0]).is_file():
        raise ConfigError(f"doctor: there is no script {words[0]!r}")
    # As Python does for a script.
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


def _too_short(script: str, steps: int) -> str:
    if not steps:
        return (
            f"doctor: {script} ended without two training steps of a DistributedDataParallel or "
            "FSDP2 model; torch.compile around such a model hides them, so leave it out here"
        )
    return (
        f"doctor: {script} ended after {steps} training steps, before all was measured; let it "
        "train longer, or pass a smaller --seconds"
    )


def _print_links() -> None:
    import torch
    import torch.distributed as dist

    from gradwire.perfmodel.link_table import measure_links

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group = dist.group.WORLD
    assert group is not None
    if group.size() < 2:
        raise ConfigError("doctor: one rank has no links; start several processes")
    table = measure_links(group, device or torch.device("cpu"))
    if group.rank() == 0:
        print("\n".join([*table.lines(), *(f"  {row.describe()}" for row in table.rows)]))
    dist.barrier()
    dist.destroy_process_group()
