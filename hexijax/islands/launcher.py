"""One job over islands: starts them, watches them, and ends them.

    start each -> all join -> they train -> all leave
    lost (exit, silence, hung up, blamed) -> fenced, named -> a new generation, or end

Who decides about life lives here and nowhere else. It needs no JAX, and waits for no
island and for no plan: it looks at processes, at the rendezvous and at its planner in
turn.
"""

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hexijax.islands.asking import Asking
from hexijax.islands.processes import Process, ended_how
from hexijax.islands.rendezvous import Heard, Rendezvous
from hexijax.islands.wire import Message

DIVERGED, LOST, INTERRUPTED = 1, 3, 130

LOOK_S = 0.05
"""Between two looks at everything."""

JOIN_S = 300.0
"""For all islands to import, compile nothing yet, and join."""

LAST_WORDS_S = 1.0
"""For what an island that has ended said before."""

GRACE_S = 10.0
"""For islands to end by themselves once the job cannot go on."""

RESTARTS = 5
"""How often in a row an island may be lost before it joined; then it stays away."""


Start = Callable[[str], Process]
"""Starts the island of that name."""

Replan = Callable[[tuple[str, ...]], tuple[tuple[str, ...], Message] | None]
"""Of these islands those that are needed, and their brief; None: no plan fits them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended."""

    code: int
    """0: all islands are done; else as the command's exit codes."""

    lost: tuple[tuple[str, str], ...] = ()
    """Islands lost on the way, and why."""

    said: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """What each said when it left."""


class Launcher:
    """Runs the islands of one job."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        start: Start | None,
        *,
        replan: Replan | None = None,
        restart: bool = False,
        join_s: float = JOIN_S,
        grace_s: float = GRACE_S,
        say: Callable[[str], None] = print,
    ):
        """
        Args:
          rendezvous: where they meet.
          start: starts one; None: others start them.
          replan: makes the brief for those who are left; None: a loss ends the job.
          restart: start a lost one again, and take it in.
          join_s: until all must have joined.
          grace_s: for them to end by themselves.
          say: takes lines for people.
        """
        self._meeting, self._start, self._say = rendezvous, start, say
        self._replan = Asking(replan) if replan else None
        self._restart = restart and start is not None
        self._join_s, self._grace_s = join_s, grace_s
        self._processes: dict[str, Process] = {}
        self._left: dict[str, Mapping[str, Any]] = {}
        self._lost: list[tuple[str, str]] = []
        self._joined: set[str] = set()  # since they were started
        self._failures: dict[str, int] = {}
        self._waiting: set[str] = set()
        self._idle: set[str] = set()  # no plan needed them
        self._halted: set[str] | None = None  # while a change is agreed on
        self._due: set[str] | None = None  # who is left, while it is planned for them
        self._due_s = 0.0  # since when
        self._asked = self._obeyed = 0  # Ctrl-C and SIGTERM
        self._ending_s: float | None = None
        self._code: int | None = None

    def run(self) -> Outcome:
        """Until all have ended; nobody is left behind, whatever happens."""
        try:
            with self._signals():
                for name in self._meeting.islands if self._start else ():
                    self._begin(name)
                while not self._over():
                    self._look()
                    time.sleep(LOOK_S)
        finally:
            self._end_all()
            self._meeting.close()
        code = self._code
        if code is None:
            codes = [int(words.get("code", 0)) for words in self._left.values()]
            code = next((c for c in codes if c), INTERRUPTED if self._asked else 0)
        return Outcome(code=code, lost=tuple(self._lost), said=dict(self._left))

    # Looking.

    def _look(self) -> None:
        while not self._meeting.heard.empty():
            self._hear(self._meeting.heard.get())
        if self._asked > self._obeyed:
            self._obey()
        lost = self._meeting.check()
        for name in lost:
            self._ended(name)
        seen = self._see_ended(lost)
        for name in lost.keys() - seen:
            self._lose(name, lost[name])
        if self._replan is not None and (found := self._replan.answer()):
            self._planned(*found)
        missing = self._meeting.missing()
        if missing and self._code is None and self._meeting.waited_s() > self._join_s:
            for name in missing:
                self._lose(name, f"it did not join within {self._join_s:g} s")

    def _see_ended(self, lost: Mapping[str, str]) -> set[str]:
        """Those whose processes have ended, and who did not leave; ``lost``: why some
        are."""
        seen: set[str] = set()
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is None or name in self._left:
                continue
            self._meeting.hear_out(name, LAST_WORDS_S)  # it may have left just now
            while not self._meeting.heard.empty():
                self._hear(self._meeting.heard.get())
            if name in self._left or self._processes.get(name) is not process:
                continue
            seen.add(name)
            if code > 0 and code != LOST:
                self._fail(name, code)
            else:
                how = process.ended() or ended_how(code)
                self._lose(name, lost.get(name, how) if code == LOST else how)
        return seen

    def _over(self) -> bool:
        if self._ending_s is not None and time.monotonic() > self._ending_s:
            return True
        if self._due is not None and self._code is None:
            return False
        if not self._meeting.islands:
            running = any(p.poll() is None for p in self._processes.values())
            self._code = self._code if running else LOST
            return not running
        if not set(self._meeting.islands) <= set(self._left):
            return False
        part = (self._processes.get(name) for name in self._meeting.islands)
        return all(process is None or process.poll() is not None for process in part)

    def _hear(self, heard: Heard) -> None:
        name = heard.island
        match heard.what:
            case "connected" if name not in self._meeting.islands:
                if self._replan is None:
                    self._meeting.dismiss(name)  # the plan has nothing for it
                    return
                self._waiting.add(name)
                if self._meeting.islands:
                    self._change()
                else:
                    self._anew(self._due or set())
            case "joined":
                self._joined.add(name)
                self._failures.pop(name, None)
                if not self._meeting.missing():
                    self._change()
            case "halted" if self._halted is not None:
                self._halted.add(name)
                if self._halted >= set(self._meeting.islands):
                    self._anew(set(self._meeting.islands))
            case "left":
                self._left[name] = heard.said
                if code := int(heard.said.get("code", 0)):
                    if code == LOST:  # of whom, if it is known here
                        self._see_ended({})
                    if self._code is None:
                        self._say_why(name, code, heard.said)
                    self._wind_down(code)
            case "blames":
                blamed = self._meeting.culprit(
                    str(heard.said.get("island")), float(heard.said.get("waited_s", 0))
                )
                if blamed in self._meeting.islands and not self._ended(blamed):
                    self._lose(blamed, f"{name} says: {heard.said.get('why')}")
            case "asks to stop":
                self._asked = self._obeyed = max(1, self._asked)
            case _:
                pass

    def _ended(self, name: str) -> bool:
        """Whether who is said to be lost has just ended, which says more."""
        process = self._processes.get(name)
        return process is not None and process.wait(0.2)

    def _say_why(self, name: str, code: int, said: Mapping[str, Any]) -> None:
        """Why an island left, unless that is told already."""
        if error := said.get("error"):
            self._say(str(error))
        elif code not in (DIVERGED, LOST, INTERRUPTED):
            self._say(f"island {name} {ended_how(code).removeprefix('it ')}:")
            if process := self._processes.get(name):
                process.wait(2.0)  # its log is whole then
                self._say(process.last_lines())

    # Deciding.

    def _begin(self, name: str) -> None:
        assert self._start is not None
        self._processes[name] = self._start(name)

    def _lose(self, name: str, why: str) -> None:
        """Fences it; then the others go on without it, or end."""
        if name in self._left:
            return
        left = set(self._meeting.islands if self._due is None else self._due)
        took_part = name in left
        self._waiting.discard(name)
        self._idle.discard(name)
        process = self._processes.pop(name, None)
        if process:
            process.kill()  # before the others hear of it: it does nothing any more
        self._meeting.lose(name, why)
        if self._code is not None:
            self._left.setdefault(name, {"code": LOST})
            return
        self._lost.append((name, why))
        self._say(f"island {name} is lost: {why}")
        if took_part:
            if self._replan is None or self._asked:
                if process and (lines := process.last_lines()):
                    self._say(f"the last lines of island {name}:\n{lines}")
                self._left[name] = {"code": LOST}
                self._wind_down(LOST)
                return
            self._anew(left - {name})
        if self._restart and self._code is None:
            had_joined = name in self._joined
            self._joined.discard(name)
            self._failures[name] = 0 if had_joined else self._failures.get(name, 0) + 1
            if self._failures[name] >= RESTARTS:
                self._say(
                    f"island {name} was lost {RESTARTS} times before it joined; it "
                    "stays away"
                )
                return
            self._begin(name)

    def _anew(self, islands: set[str]) -> None:
        """Ends this generation, and asks for a plan of ``islands`` and all who wait."""
        assert self._replan is not None
        self._halted = None
        self._meeting.suspend()  # nobody joins what has ended
        order = self._in_order({*islands, *self._waiting, *self._idle})
        if self._due is None:
            self._due_s = time.monotonic()
        self._due = set(islands) if order else None  # the first that is back goes on
        if order:
            self._replan.begin(order)

    def _planned(
        self, order: tuple[str, ...], found: tuple[tuple[str, ...], Message] | None
    ) -> None:
        """There is a plan for ``order``, or none fits: take it, if it is still they."""
        if self._code is not None:
            return
        if self._due is None:
            self._halt_for(order, found)
        elif order != self._in_order({*self._due, *self._waiting, *self._idle}):
            self._anew(self._due)
        elif found is None:
            self._due = None
            self._say(f"no plan fits {', '.join(order)} alone; the job ends")
            self._wind_down(LOST)
        else:
            self._begin_generation(order, *found)

    def _begin_generation(
        self, order: tuple[str, ...], needed: tuple[str, ...], brief: Message
    ) -> None:
        """Of those of ``order`` that are needed."""
        self._due = None
        self._waiting -= {*order}
        self._idle = {*order} - {*needed}
        generation = self._meeting.anew(needed, brief)
        unused = f"; not needed: {', '.join(sorted(self._idle))}" if self._idle else ""
        planned = f"; planned in {time.monotonic() - self._due_s:.2f} s"
        self._say(f"generation {generation}: {', '.join(needed)}{unused}{planned}")

    def _change(self) -> None:
        """Asks for a plan with those who wait, once all others train."""
        if self._replan is None or not self._changeable():
            return
        self._replan.begin(self._with_all())

    def _changeable(self) -> bool:
        busy = self._halted is not None or self._due is not None or self._asked
        return bool(self._waiting) and not busy and not self._meeting.missing()

    def _with_all(self) -> tuple[str, ...]:
        return self._in_order({*self._meeting.islands, *self._idle, *self._waiting})

    def _halt_for(
        self, order: tuple[str, ...], found: tuple[tuple[str, ...], Message] | None
    ) -> None:
        """Lets those who train halt for those who wait, if that changes anything."""
        if not self._changeable():
            return
        if order != self._with_all():
            self._change()
        elif found is None or found[0] == self._meeting.islands:
            self._idle |= self._waiting
            self._waiting.clear()
        else:
            self._halted = set()
            self._meeting.stop(change=True)

    def _in_order(self, islands: set[str]) -> tuple[str, ...]:
        return tuple(name for name in self._meeting.known if name in islands)

    def _fail(self, name: str, code: int) -> None:
        """It ended by itself, with a fault: so does the job."""
        process = self._processes[name]
        process.wait(2.0)
        self._left[name] = {"code": code}
        if self._code is None:
            self._say(f"island {name} {ended_how(code).removeprefix('it ')}:")
            self._say(process.last_lines())
            self._meeting.lose(name, ended_how(code))
        self._wind_down(code)

    def _wind_down(self, code: int) -> None:
        """The job ends with ``code``; who does not end by itself is ended."""
        if self._code is None:
            self._code = code
            self._ending_s = time.monotonic() + self._grace_s

    def _obey(self) -> None:
        if self._asked == 1 and self._halted is not None:
            return  # once all have halted and saved: none is to wait for one that ends
        self._obeyed = self._asked
        train = self._due is None and not self._meeting.missing()
        if self._asked == 1 and train:
            self._say("Stopping in a few steps; Ctrl-C again stops at once.")
            self._meeting.stop()
            return
        self._code, self._ending_s = INTERRUPTED, time.monotonic()

    # Ending.

    def _end_all(self) -> None:
        for name in {*self._waiting, *self._idle}:
            self._meeting.dismiss(name)
        running = [p for p in self._processes.values() if p.poll() is None]
        for process in running:
            process.signal(signal.SIGTERM)
        until = time.monotonic() + min(self._grace_s, 3.0)
        for process in running:
            process.wait(max(0.0, until - time.monotonic()))
        for process in self._processes.values():
            process.kill()

    @contextmanager
    def _signals(self) -> Generator[None]:
        """While it lasts, Ctrl-C and SIGTERM are counted and obeyed in turn."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: FrameType | None) -> None:
            self._asked += 1

        both = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, ask) for number in both]
        try:
            yield
        finally:
            for number, handler in zip(both, before, strict=True):
                signal.signal(number, handler)
