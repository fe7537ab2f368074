"""Runs scripts of pages on ranks that already exist."""

import sys
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import torch.distributed as dist


def run_script(code: str, *arguments: str) -> str:
    """Runs a script as torchrun would, in the group of this rank; returns what it prints."""
    printed = StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "argv", ["script.py", *arguments]),
        redirect_stdout(printed),
    ):
        exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()
