"""`Trainer`: a training loop that survives: what it has consumed and learnt is kept, and goes on under any number of
processes."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from autoparallel.errors import UserError
from autoparallel.intervals import default_interval_s
from autoparallel.peers import PeerOptions, copies_every
from autoparallel.plan_cache import StrategySource, read_source
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles import Cluster
from autoparallel.replan import NextStrategy, for_those_here
from autoparallel.runtime.checkpoints.identity import launch_key, model_identity
from autoparallel.runtime.checkpoints.keeper import Checkpoints
from autoparallel.runtime.checkpoints.ledger import Ledger
from autoparallel.runtime.checkpoints.signals import Signals, Wish
from autoparallel.runtime.elastic.draws import seed_step, stage_of
from autoparallel.runtime.guards.deadline import Deadline, check_alike
from autoparallel.runtime.guards.guards import GuardOptions, Guards, Verdict
from autoparallel.runtime.guards.status import own_status
from autoparallel.runtime.monitor.clock import StepClock
from autoparallel.runtime.monitor.monitor import MonitorOptions
from autoparallel.runtime.ranks.agreement import Agreement
from autoparallel.runtime.ranks.mesh import start_ranks, world_size
from autoparallel.samples import Samples
from autoparallel.trained import Trained, lowered
from autoparallel.watched import Watched

# How long ranks wait for each other's small messages at the end of a step, seconds. Kind: torch's default for Gloo.
TIMEOUT_S = 1800.0
MOST_ROLL_BACKS = 3  # in one start of a run. Kind: choice; what comes back so often is no accident
STOPPED = 143  # exit status of a run that SIGTERM ended after it was saved: 128 + 15
SWITCHED = 75  # of one that is to be started again, under another strategy: EX_TEMPFAIL; the agent of `autoparallel run` does


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step did: `number` counts from 1, `loss` is the mean over the global batch, `ids` the samples of this
    data-parallel rank."""

    number: int
    loss: float
    ids: tuple[int, ...]
    seconds: float
    skipped: bool = False  # the batch was left out


class Trainer:
    """Trains `model` on `data` by a strategy, keeps checkpoints in `folder`, and goes on from the last one.

    `data` is a map-style dataset of (input, target) pairs with `loss_fn`, else of what the model is called with; where phases change
    the length of sequences a mapping of datasets by that, each with a ledger of its own.
    `optimizer` is a class of torch's, or a `functools.partial` of one with its options; `scheduler` makes a schedule of
    the learning rate of it, stepped once a step. `strategy` and `cluster` are as for `auto_parallelize`; where the
    processes are not those that a strategy was made for, one is planned for those that are here (`pinned`: refused
    instead). The global batch and the order of samples stay what they are. `every` steps or `every_s` seconds, on
    SIGUSR1, and at the end a checkpoint is saved, the last `keep` are kept; SIGTERM and SIGINT save and end the process
    with status 143. With `peers` the state is also copied to the memory of this node and of a neighbour: a node that is lost
    loses no more. Where they are not given, the strategy's `[recovery]` says these, and the time-out. `on_step` is called on every rank after every step. `accept` names what may have changed since the
    checkpoint: "model", "dataset".

    `guards` says what is found out (see `GuardOptions`): losses and gradients that are no numbers; replicas that differ, of
    which the rank is named, and all go back to the last checkpoint; ranks that die, hang, or are fed other shapes: then
    every rank ends with an error that says who, in which stage and action. `monitor` says what is recorded of every step
    (`autoparallel watch FOLDER` shows it).

    Collective. Raises UserError, on every rank, for what `auto_parallelize`, `Checkpoints` and `Ledger` refuse.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Callable[..., Optimizer],
        data: Dataset[Any] | Mapping[int, Dataset[Any]],
        global_batch: int | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        example_inputs: Any = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        strategy: Strategy | str | os.PathLike[str] | None = None,
        cluster: Cluster | str | None = None,
        pinned: bool = False,
        folder: str | os.PathLike[str] = "run",
        every: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        peers: PeerOptions | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tail: str = "carry",
        collate: Callable[[list[Any]], Any] = default_collate,
        loader: Mapping[str, Any] | None = None,
        weights: str | os.PathLike[str] | None = None,
        allow_lossy: bool = False,
        accept: tuple[str, ...] = (),
        guards: GuardOptions | None = None,
        monitor: MonitorOptions | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.rank, _ = start_ranks()
        self._all = Agreement(TIMEOUT_S)
        source = self._all.decided(lambda: read_source(strategy))  # a file may be edited meanwhile
        size = global_batch or source.global_batch
        if size is None:
            raise UserError("Trainer needs global_batch=, or batch.global in the strategy file")
        self._loss_fn, self._clip_norm, self._seed, self._on_step = loss_fn, clip_norm, seed, on_step
        order = partial(Ledger, seed=seed, shuffle=shuffle, tail=tail)
        self._samples = Samples(data, order, size, source.said, collate=collate, loader=loader or {})
        identity = {"model": model_identity(model), **self._samples.identity()}
        self._check_alike(identity, size)
        self.checkpoints = Checkpoints(
            folder, every=every, every_s=every_s, keep=keep, say=self._say,
            identity={what: hash_ for what, hash_ in identity.items() if what not in accept},
        )  # fmt: skip
        with self._starting(Path(folder) / "ranks", guards := guards or GuardOptions()):
            self._next = NextStrategy(Path(folder), self._all)
            source, here, own_size = self._for_those_here(source, cluster, size, pinned=pinned)
            lower = partial(
                lowered, self._example, self._samples.others, example_inputs, own_size, cluster=here,
                cache=Path(folder) / "plans", graph=(graph := Path(folder) / f"graph-{launch_key(identity['model'])}.json"),
                allow_lossy=allow_lossy, weights=weights, progress=self._at,
            )  # fmt: skip
            self._samples.check((source := self._next.in_place_of(source, self._say)).said)
            self._trained = Trained(model, source, lower, optimizer=optimizer, scheduler=scheduler)
            self._guards = self._guarded(guards)
            self._peers_every = copies_every(peers, self.checkpoints, self.model, here, self._say)
            self._watched = self._watching(graph, here, monitor or MonitorOptions())
            self._begin()

    @contextmanager
    def _starting(self, statuses: Path, options: GuardOptions) -> Iterator[None]:
        """What comes before the first step, as long as all ranks live. Whoever is refused and tries again in this process finds the
        folder free."""
        self._clock = StepClock()
        try:
            self._status = own_status(statuses, self._all)
            self._deadline = Deadline(statuses, self.rank, self._status)
            with self._deadline.while_all_live(options.lost_after_s):
                yield
        except UserError:
            self.close()
            raise

    def _for_those_here(
        self, source: StrategySource, cluster: Cluster | str | None, size: int, *, pinned: bool
    ) -> tuple[StrategySource, Cluster | None, int]:
        """Strategy, cluster and samples a step of these processes."""
        return *for_those_here(source, cluster, pinned=pinned, say=self._say), size

    def _guarded(self, options: GuardOptions) -> Guards:
        return Guards(
            self.model, self._all, self._status, self._deadline, options, self._say,
            self.model.strategy.recovery.timeout_s,
        )  # fmt: skip

    def _watching(self, graph: Path, cluster: Cluster | None, options: MonitorOptions) -> Watched:
        return Watched(
            self.checkpoints.folder.path, self._all, self._clock, graph=graph, cluster=cluster, options=options,
            say=self._say,
        )  # fmt: skip

    def _begin(self) -> None:
        if self.checkpoints.every is None and self.checkpoints.every_s is None:
            self.checkpoints.every_s = default_interval_s(self.model.strategy.recovery)
        self.step, self._rolled_back, self._signals = 0, 0, Signals()
        self._stage = stage_of(self.rank, self.model.strategy)
        self._resume()
        self._monitor = self._watched.monitor(self.model, self._stage, self.step)

    def _check_alike(self, identity: Mapping[str, str], size: int) -> None:
        hint = "start all ranks with the same script, data and installation"
        check_alike(self._all, {**identity, "the global batch": size, "torch": torch.__version__}, hint=hint)

    def _at(self, action: str, stage: int) -> None:
        """An action begins."""
        self._status.at(action, stage)
        self._clock.at(action, stage)

    def _resume(self, *, from_memory: bool = True) -> bool:
        """Go on from the last whole checkpoint, if there is one: whether there is."""
        with self._guards.while_all_live():
            restored = self.checkpoints.load(self._state(), from_memory=from_memory)
        if restored is not None:
            self.step = restored.step
            self._samples.go_on(restored.extra["ledger"], str(self.checkpoints.folder.path))
            where = ", from copies in memory" if restored.in_memory else ""
            processes = f"{world_size()} process{'es' * (world_size() > 1)}"
            self._say(f"going on after step {self.step} on {processes}{where}")
        return restored is not None

    @property
    def model(self) -> Any:
        """The parallel model, whose members no type names; another one once a phase needs one."""
        return self._trained.model

    @property
    def optimizer(self) -> Optimizer:
        """The model's optimizer."""
        return self._trained.optimizer

    @property
    def scheduler(self) -> Any:
        """The schedule of its learning rate; None where there is none."""
        return self._trained.scheduler

    @property
    def ledger(self) -> Ledger:
        """Which samples are consumed."""
        return self._samples.ledger

    @property
    def interrupted(self) -> bool:
        """Whether a signal came that the end of this step acts on: what waits in `on_step` had better stop waiting."""
        return self._signals.received is not Wish.NOTHING

    def fit(self, steps: int) -> None:
        """Train until `steps` steps are done since the beginning of the run, those before an interruption counted. Raises UserError, on
        every rank, where the last state could not be saved."""
        begun = self.step
        with self._signals, self._guards.around(), self._watched.meter.around():
            while self.step < steps:
                self._until_rolled_back(steps)
            with self._guards.while_all_live():
                self.checkpoints.finish()
                self.checkpoints.forget_copies()
        if self.step > begun and not self._kept:
            raise UserError(
                f"all {self.step} steps are done, and their result is not saved (what was said above says why): make room in "
                f"{self.checkpoints.folder.path} and start again: the run goes on from its last checkpoint"
            )

    @property
    def _kept(self) -> bool:
        """Whether the state after the last step is on the disk, once a save has ended."""
        return self.checkpoints.last_good == self.step

    def _until_rolled_back(self, steps: int) -> None:
        """Steps to the end, or until one has gone back to a checkpoint: samples are then read from there."""
        batches = self._samples.shares(self.model.data_parallel_rank, self.model.data_parallel_size)
        while self.step < steps:
            begun = time.perf_counter()
            self._status.begin(self.step + 1)
            self._monitor.begin(self.step + 1)
            self._at("DATA", self._stage)
            if self._enter_phase():  # whose shares of the samples are others
                return
            items, ids = next(batches)
            verdict, loss = Verdict.SKIP, math.nan
            if not self._samples.left_out():
                verdict, loss = self._train(items, ids)
            if verdict is Verdict.ROLL_BACK:
                self._roll_back(leave_out=not math.isfinite(loss))
                return
            self._after_step(loss, ids, begun, skipped=verdict is Verdict.SKIP)
            if not self._keep(last=self.step == steps):
                return

    def _enter_phase(self) -> bool:
        """Begin the phase of the next step; whether that made the model anew, and all that goes by its strategy with it."""
        with self._guards.while_all_live():
            if not self._trained.enter(self.step + 1):
                return False
        strategy = self.model.strategy
        self._samples.size = strategy.batch.global_
        self._samples.enter(strategy.batch.seq_len)
        self._stage = stage_of(self.rank, strategy)
        self._guards.follow(self.model)
        self._monitor = self._watched.monitor(self.model, self._stage, self.step)
        self._say(f"step {self.step + 1}: another phase begins, for which the model was made anew")
        return True

    def close(self) -> None:
        """Let the folder go; without it the end of the process does."""
        self.checkpoints.close()
        for name in ("_deadline", "_status"):  # of a trainer that was refused, what there is
            if (part := getattr(self, name, None)) is not None:
                part.close()

    def _train(self, items: Any, ids: list[int]) -> tuple[Verdict, float]:
        """One step of the optimizer, if its guards let it."""
        seed_step(self._seed, self.step, self.model.data_parallel_rank, self._stage)
        self._guards.begin(self.step + 1, items)
        self.optimizer.zero_grad()
        own: list[Tensor] = []
        loss = float(self._forward_and_backward(items, own))
        return self._optimize(loss, own, ids), loss

    def _optimize(self, loss: float, own: list[Tensor], ids: list[int]) -> Verdict:
        """After the backward pass: step the optimizer, if its guards let it."""
        self._at("CHECK", self._stage)
        verdict = self._guards.judge(self.step + 1, loss, own, ids)
        if verdict is Verdict.TAKE:
            self._at("STEP", self._stage)
            if self._clip_norm is not None:
                self.model.clip_grad_norm_(self._clip_norm)
            self.optimizer.step()
        if self.scheduler is not None and verdict is not Verdict.ROLL_BACK:
            self.scheduler.step()
        return verdict

    def _forward_and_backward(self, items: Any, own: list[Tensor]) -> Tensor:
        """The mean loss over the global batch; `own` gets the losses of this rank's micro-batches."""
        if self._loss_fn is None:
            mean: Tensor = self.model.step(items)
            return mean
        given = self._loss_fn

        def noted(output: Any, target: Any) -> Tensor:
            own.append((loss := given(output, target)).detach())
            return loss

        mean = self.model.step(items[0], items[1], loss_fn=noted)
        return mean  # noqa: RET504

    def _after_step(self, loss: float, ids: list[int], begun: float, *, skipped: bool) -> None:
        self.step += 1
        self._samples.consume(skipped=skipped)
        self._guards.end(seconds := time.perf_counter() - begun)
        if skipped:
            self._monitor.skipped(self.step)
        else:
            with self._guards.in_time():
                self._monitor.end(self.step, loss, seconds)
        if self._on_step is not None:
            done = Step(number=self.step, loss=loss, ids=tuple(ids), seconds=seconds, skipped=skipped)
            self._on_step(done)

    def _keep(self, *, last: bool) -> bool:
        """Save where it is due, or where a signal asks for it; end where it asks for that. False: gone back instead."""
        self._status.at("SIGNALS", self._stage)
        with self._guards.in_time():
            own = max(self._signals.take(), Wish.SWITCH if self._next.asked_for() else Wish.NOTHING)
            wish = Wish(int(self._all.most(own)[0]))
            saves = last or wish is not Wish.NOTHING or self.checkpoints.due(self.step)
            equal = not saves or self._guards.equal(self.step)
        if not equal:
            self._roll_back(leave_out=False)
            return False
        stops = wish is Wish.STOP
        with self._guards.while_all_live():
            if saves:
                self._status.at("SAVE", self._stage)
                self.checkpoints.save(self.step, self._state(), extra={"ledger": self._samples.state()})
            if self._peers_every and self.step % self._peers_every == 0:
                self.checkpoints.copy(self.step, self._state(), extra={"ledger": self._samples.state()})
            self.checkpoints.poll()
            if stops or wish is Wish.SWITCH:
                self.checkpoints.close()
        if stops or wish is Wish.SWITCH:
            after = f"after step {self.step}"
            saved = f"saved {after}" if self._kept else f"the state {after} could not be saved"
            self._say(f"told to {'stop' if stops else 'go on under next.toml'}: {saved}")
            raise SystemExit(STOPPED if stops else SWITCHED)
        return True

    def _roll_back(self, *, leave_out: bool) -> None:
        """Go back to the last checkpoint; `leave_out` the batch that the ledger has come to."""
        self._rolled_back += 1
        if leave_out:
            self._samples.leave_out()
        self.optimizer.zero_grad()
        if self._rolled_back > MOST_ROLL_BACKS or not self._resume(from_memory=False):
            raise UserError(
                f"step {self.step + 1}: cannot go back: {self._rolled_back - 1} times done already (at most "
                f"{MOST_ROLL_BACKS}), or there is no checkpoint; see what was said above"
            )

    def _state(self) -> dict[str, Any]:
        state = {"model": self.model, "optimizer": self.optimizer}
        return {**state, "scheduler": self.scheduler} if self.scheduler is not None else state

    def _example(self, tokens: int = 0) -> Any:
        """Inputs of as many samples as a process has, as `auto_parallelize` takes them, of the length that is asked for."""
        items = self._samples.example(max(self._samples.size // world_size(), 1), tokens)
        return items if self._loss_fn is None else items[0]

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(f"autoparallel: {text}", file=sys.stderr, flush=True)
