"""One island's part of a job: an engine for each generation, halts that all agree on.

    Member -> welcome: plan -> join: World -> make_machine -> where all go on from
    Loop --pause--> stop asked: the step to end at, or to halt at for a change
    IslandLost -> blamed, a new generation -> the newest step that all can read

What an island goes on from it has in memory, as far as it saved that itself, and reads
where runs are saved, which all of them see.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hexijax.checkpoint.assign import load_solver
from hexijax.checkpoint.saver import Saver
from hexijax.checkpoint.sources import DISK, FAR
from hexijax.checkpoint.writer import remove_part
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.experiment import BatchIterator, Experiment
from hexijax.islands.member import Member
from hexijax.islands.world import IslandLost, Welcome
from hexijax.job import saving
from hexijax.job.digests import digest
from hexijax.job.loop import Loop
from hexijax.job.machine import Machine, Progress, make_machine
from hexijax.job.plans import check_plan
from hexijax.layers.chain import Chain
from hexijax.plan import Plan, serial
from hexijax.report import RunFolder
from hexijax.weights.stored.parts import SESSION, parts_in

SPARE_S = 2.0
"""Beyond the silence after which the launcher knows of a loss, for it to say so."""

LOOKS, LOOK_S = 10, 1.0
"""For saves, where some islands see one and others none, and between two."""

SLACK = 3
"""Steps that an island goes on while the step to halt after is agreed on: another may
be that far ahead, in a step that needs this one's part."""


class Halt(threading.Event):
    """What ends a loop: asked for by one, agreed on by all."""

    def __init__(self, member: Member):
        super().__init__()
        self._member = member

    def set(self) -> None:
        """Asks all; Ctrl-C in one island does so."""
        self._member.ask_stop()

    def now(self) -> None:
        """Ends the loop after the step that follows."""
        super().set()


class Islanded:
    """See above."""

    def __init__(
        self,
        *,
        member: Member,
        welcome: Welcome,
        start_server: Callable[[], Any],
        experiment: Experiment,
        chain: Chain,
        facts: Mapping[str, str],
        folder: RunFolder,
        emulate: bool,
        say: Callable[[str], None],
        progress: Progress,
    ):
        """
        Args:
          member: of the rendezvous.
          welcome: of the first generation.
          start_server: starts one for transfers; each generation has its own.
          experiment: what is trained.
          chain: its model.
          facts: what must be the same on all islands, besides the plan.
          folder: of the run.
          emulate: let any device stand for any other.
          say: takes lines for people.
          progress: told (what, done, total) while compiling.
        """
        self.member, self._welcome = member, welcome
        self._start_server = start_server
        self._experiment, self._chain = experiment, chain
        self._facts, self.folder = dict(facts), folder
        self._emulate, self._say, self._progress = emulate, say, progress
        self.done = 0
        """Steps done when the run ended."""
        self.changes: list[int] = []
        """Generations that followed the first."""
        self.saver: Saver | None = None
        """Of the run, if it saves."""
        self._agree_s = float(welcome.brief["wait_s"])
        self._first: Any = None  # where the data began
        self._posted: int | None = None  # steps done when it heard of a halt
        self._last: int | None = None  # the step agreed on to halt at
        self._session = ""
        self._took: dict[str, float] = {}  # seconds of what is between two generations
        self.machine: Machine
        self.plan: Plan
        self.cluster: Cluster

    @property
    def own_folder(self) -> RunFolder:
        """Where this island writes its figures: the run's folder, if it leads."""
        if self.leads:
            return self.folder
        folder = self.folder.path / "islands" / self.member.name
        folder.mkdir(parents=True, exist_ok=True)
        return RunFolder(folder)

    def begin(self) -> None:
        """Makes the first machine, as soon as all islands of a generation are there."""
        if self._welcome.brief.get("elastic"):
            load_solver()
        while True:
            try:
                return self._begin()
            except IslandLost as error:
                self._blame(error)
            self._next_welcome()

    @property
    def engine(self) -> Any:
        """That of now."""
        return self.machine.engine

    @property
    def leads(self) -> bool:
        """Whether this island writes what the run leaves."""
        return self._welcome.islands[0] == self.member.name

    def _start(self, batches: BatchIterator, shared: Mapping[str, Any]) -> int:
        """Gives the engine its state; the step from which all go on."""
        self._first = batches.get_state() if self._first is None else self._first
        self.engine.init()
        again = self._welcome.brief.get("resume") or self._welcome.generation > 0
        if not again:
            return 0
        seen = self._seen()
        step = min(seen.values())
        resumes = bool(self._welcome.brief.get("resume"))
        check_seen(seen, self.folder.path, resumes=resumes)
        if resumes and self._welcome.generation == 0:
            check_left(step, self._experiment.steps, self.folder.path)
        if self.leads:
            self._forget_after(step)
        self.member.gather("forgotten", None, self._agree_s)
        if not step:
            batches.set_state(self._first)
            return 0
        moving = time.monotonic()
        found = saving.restore(
            self.folder,
            self.engine,
            shared,
            self._say,
            step=step,
            remembered=self.saver.remembered if self.saver else (),
        )
        batches.set_state(saving.position(found.stand, self.folder.path))
        self._took["moved"] = time.monotonic() - moving
        took = ", ".join(f"{what} in {s:.2f} s" for what, s in self._took.items())
        self._say(f"going on after step {step}: {found.moved}\n  {took}")
        return step

    def _seen(self) -> Mapping[str, int]:
        """The newest step that is whole for each island; 0: none. A folder that all see
        may show what was just written to one sooner than to another."""
        seen: Mapping[str, int] = {}
        for look in range(LOOKS):
            newest = next(iter(saving.stored(self.folder, self._say).whole()), 0)
            seen = self.member.gather(f"newest {look}", newest, self._agree_s)
            if all(seen.values()) or not any(seen.values()):
                break
            time.sleep(LOOK_S)
        return seen

    def run(
        self,
        make_loop: Callable[["Islanded"], Loop],
        batches: BatchIterator,
        back: Callable[[int], None],
        shared: Mapping[str, Any],
    ) -> bool:
        """Trains to the end, through all generations; False: all were asked to stop.

        Args:
          make_loop: a loop over ``batches`` on ``machine``.
          batches: that can be put back.
          back: told, as each generation begins, the step that follows.
          shared: facts that a saved run must share.

        Raises:
          IslandLost: another island is lost, and the launcher ends the job.
        """
        while True:
            try:
                start = self._start(batches, shared)
                back(start)
                if self._generation(make_loop, start):
                    return self.done == self._experiment.steps
            except IslandLost as error:
                self._blame(error)
            except RuntimeError as error:  # of JAX, perhaps: a transfer that broke
                self._explain(error)
            self._anew()

    def _generation(self, make_loop: Callable[["Islanded"], Loop], start: int) -> bool:
        """Steps until the end (True), or until all have halted for a change."""
        self._posted = self._last = None
        if self.saver is not None:
            self.saver.facts = {**(self.saver.facts or {}), SESSION: self._session}
            self.saver.remember = bool(self._welcome.brief.get("elastic"))
        loop = make_loop(self)
        loop.stop = halt = Halt(self.member)
        loop.pause = lambda done: self._pause(done, halt)
        loop.run(start)
        self.done = loop.done
        if self._last is None:  # all take part once a generation
            self._agree(loop.done, wait=True)
        if loop.paused:
            if self.saver is not None and loop.save is not None:
                loop.save(loop.done)
                self.saver.close(loop.done)
            self.member.halted(loop.done)
            return False
        if self.saver is not None:
            self.saver.close(loop.done)
        self.member.gather("saved", loop.done, self._agree_s)
        return True

    def _pause(self, done: int, halt: Halt) -> bool:
        """Before each step: whether to halt here for a change. To end, ``halt`` is set:
        a loop looks at it after the step that follows."""
        if not self.member.stopping.is_set():
            return False
        if self._last is None:
            self._agree(done, wait=False)
        if done != self._last:
            return False
        if self.member.change:
            return True
        halt.now()
        return False

    def _agree(self, done: int, *, wait: bool) -> None:
        """Tells where this island was when it heard of it, and goes on for ``SLACK``
        steps, until it knows where all were: nobody is past the last of them then, and
        who is ahead is not kept waiting by who stands still."""
        if self._posted is None:
            self._posted = done
            self.member.post("halt", done)
        wait = wait or done >= self._posted + SLACK
        if wait or self.member.collected("halt"):
            found = self.member.collect("halt", self._agree_s)
            self._last = max(found.values()) + SLACK

    def _blame(self, error: IslandLost) -> None:
        """Tells the launcher of a loss it may not know of."""
        if self.member.lost() is None:
            why = f"{error.what}, {error.seconds:.0f} s"
            waited_s = error.seconds if error.late else 0.0
            self.member.blame(error.island, why, waited_s)
        if not self._welcome.brief.get("elastic"):
            raise error
        self._say(str(error))

    def _explain(self, error: RuntimeError) -> None:
        """A step failed; raises the error unless the launcher knows of a loss."""
        silence_s = float(self._welcome.brief["silence_s"])
        lost = self.member.await_loss(silence_s + SPARE_S)
        if lost is None:
            raise error
        words = (str(error).splitlines() or [""])[0]
        self._blame(IslandLost(lost, "the step at hand", 0.0, words))

    # Generations.

    def _anew(self) -> None:
        """Takes part in the next generation that comes about."""
        if self.saver is not None:
            self.saver.abandon()
        with contextlib.suppress(AttributeError):  # a generation may end as it begins
            del self.machine  # its memory is needed
        self._next_welcome()
        self.begin()
        self.changes.append(self._welcome.generation)
        if self.saver is not None:
            self.saver.engine = self.engine
            self.saver.node_of = saving.nodes(self.engine)

    def _next_welcome(self) -> None:
        after = self._welcome.generation
        self._welcome = self.member.welcome(after, float("inf"))

    def _begin(self) -> None:
        """Joins the generation, and makes its machine."""
        from hexijax.islands.transfer import TransferChannel

        text = str(self._welcome.brief["plan"])
        saved = serial.loads(text.encode(), "the launcher's plan")
        self.plan, self.cluster = saved.plan, saved.cluster
        check_plan(
            self.plan,
            self._experiment,
            self._chain,
            self.cluster,
            what="The launcher's plan",
        )
        began = time.monotonic()
        server = self._start_server()
        world = self.member.join(
            self._welcome,
            address=server.address,
            facts={"plan": digest(text), **self._facts},
            seconds=float(self._welcome.brief["wait_s"]),
            pull_s=float(self._welcome.brief["pull_s"]),
        )
        met = time.monotonic()
        channel = TransferChannel(server, world, self.member.lost)
        self.member.waits, self._session = channel.waits, world.session
        self.machine = make_machine(
            self._experiment,
            self.cluster,
            self._chain,
            self.plan,
            emulate=self._emulate,
            progress=self._progress,
            world=world,
            channel=channel,
        )
        made = time.monotonic()
        self.member.gather("made", None, self._agree_s)  # some compile longer
        self._took = {
            "met": met - began,
            "compiled": made - met,
            "all had": time.monotonic() - made,
        }

    def _forget_after(self, step: int) -> None:
        """Removes what was saved of later steps: with parts written from now on they
        could seem whole, and be of two minds."""
        if self.saver is None:
            return
        tiers = self.saver.tiers
        for files, label in ((tiers.fast, DISK), (tiers.far, FAR)):
            for part in parts_in(files, label) if files is not None else ():
                if part.step > step:
                    remove_part(part)


def check_seen(seen: Mapping[str, int], path: Path, *, resumes: bool) -> None:
    """Before islands forget what not all can read: who sees nothing of a run looks at
    another folder than the others.

    Args:
      seen: the newest step of each island; 0: none.
      path: of the run.
      resumes: a saved run goes on, so there must be one.

    Raises:
      UserError: to begin anew would remove what the others see.
    """
    blind = ", ".join(name for name, step in seen.items() if not step)
    if blind and (resumes or any(seen.values())):
        others = [f"{name} sees step {step}" for name, step in seen.items() if step]
        raise UserError(
            f"No save of {path} is whole for {blind}; "
            f"{', '.join(others) or 'nobody sees one'}. Islands go on from a folder "
            "that all of them see: name it by --out or --fast, and look at the mounts."
        )


def check_left(done: int, steps: int, path: Path) -> None:
    """That a run which is resumed has steps to do.

    Raises:
      UserError: it has none.
    """
    if done >= steps:
        raise UserError(
            f"--resume: {path} has done {done} steps already and {steps} were asked "
            f"for. Ask for more: --set steps={2 * done}."
        )
