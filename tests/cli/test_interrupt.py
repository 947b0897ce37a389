"""Ctrl-C is never a traceback, wherever it arrives."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from autoparallel.cli_errors import INTERRUPTED, exits


def test_a_module_interrupted_while_it_is_imported_is_an_interruption() -> None:
    @exits
    def command() -> None:
        raise ImportError("initialization failed") from KeyboardInterrupt()

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == INTERRUPTED


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    @exits
    def command() -> None:
        raise ImportError("no such module")

    with pytest.raises(ImportError, match="no such module"):
        command()


def test_an_interrupt_before_the_command_line_is_there_leaves_no_traceback() -> None:
    code = (
        "import sys, runpy\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "runpy.run_module('autoparallel', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == INTERRUPTED, ended
    assert ended.stderr == "interrupted; nothing was written\n", ended.stderr
