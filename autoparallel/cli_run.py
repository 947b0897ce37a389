"""`autoparallel run`: start a training script on this machine's devices, and keep it going."""

from __future__ import annotations

from typing import Annotated

import typer

from autoparallel.cli_errors import exits


@exits
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT.py ARGUMENTS…", help="The training script and what it takes."),
    ],
    nnodes: Annotated[
        str, typer.Option("--nnodes", metavar="N|MIN:MAX", help="Machines: between MIN and MAX may be there.")
    ] = "1",
    per_node: Annotated[
        int | None,
        typer.Option("--nproc-per-node", min=1, help="Processes on this machine; by default one a device."),
    ] = None,
    endpoint: Annotated[
        str,
        typer.Option(
            "--rdzv-endpoint", metavar="HOST:PORT", help="Where several machines meet: one that stays."
        ),
    ] = "",
    run_id: Annotated[
        str, typer.Option("--rdzv-id", metavar="NAME", help="Tells runs apart that meet in one place.")
    ] = "",
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="After so many processes that died the run ends.")
    ] = 10,
    grace: Annotated[
        int, typer.Option("--grace", min=0, metavar="SECONDS", help="To save and end in, once told to.")
    ] = 30,
    join: Annotated[
        float,
        typer.Option(
            "--join", min=0.0, metavar="SECONDS", help="Wait so long for more machines than the fewest."
        ),
    ] = 5.0,
    lighthouse: Annotated[
        str,
        typer.Option(
            "--lighthouse", metavar="URL", help="Where replicas that may drop out meet: see ReplicaTrainer."
        ),
    ] = "",
    replica: Annotated[
        str,
        typer.Option(
            "--replica", metavar="NAME", help="What this replica is called; the same after a restart."
        ),
    ] = "",
) -> None:
    """Run a training script under torch's elastic agent: what dies is restarted, machines may leave and come."""
    from autoparallel.runtime.elastic.launch import Launch, parse_nodes, run_script

    status = run_script(
        command,
        Launch(
            nodes=parse_nodes(nnodes), per_node=per_node, endpoint=endpoint, run_id=run_id,
            max_restarts=max_restarts, grace_s=grace, join_s=join, lighthouse=lighthouse, replica=replica,
        ),
    )  # fmt: skip
    if status:
        raise typer.Exit(status)
