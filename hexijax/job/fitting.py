"""Many steps from batches that a person hands over, saved and counted on the way.

Elastic | Fixed, batches, Saver -> Fitting.run -> whether all steps were done
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator

from hexijax.checkpoint.saver import Saver
from hexijax.experiment import Batch, BatchIterator, Experiment
from hexijax.job.elastic import Elastic
from hexijax.job.handed import Counted, position
from hexijax.job.loop import Line, Loop
from hexijax.job.machine import Fixed
from hexijax.job.membership import watched
from hexijax.job.screen import Quiet, Screen
from hexijax.report import Meter, RunFolder


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """One call of ``Trainer.fit``."""

    job: Elastic | Fixed

    experiment: Experiment
    """Its steps end where this call's do."""

    batches: Iterator[Batch]
    """What is trained on."""

    iterator: Iterator[Batch]
    """The person's own, whose position is saved; an elastic job puts it back."""

    meter: Meter
    screen: Quiet | Screen

    stop: threading.Event
    """Ends the loop early, and whole."""

    count: Callable[[int], None]
    """Told the steps done."""

    tell: Callable[[Line], None]
    """Takes a step's line."""

    saver: Saver | None
    folder: RunFolder | None
    """Where it saves."""

    tell_plan: Callable[[RunFolder, Saver], None]
    """Writes the plan of now into the folder."""

    def run(self, start: int) -> bool:
        """From so many steps to the last; what is to be saved is when it returns."""
        try:
            if isinstance(self.job, Elastic):
                finished, done = self._with_members(self.job, start)
            else:
                loop = self._loop()
                finished = loop.run(start)
                done = loop.done
        finally:
            if self.saver is not None:
                self.saver.close()
        if self.saver is not None:
            self.saver.close(done)
        return finished

    def _with_members(self, job: Elastic, start: int) -> tuple[bool, int]:
        """Under plan after plan; and the steps done."""
        assert isinstance(self.iterator, BatchIterator)
        job.steps = self.experiment.steps

        def anew(changed: Elastic) -> Loop:
            self.meter.peak_flops_per_s = changed.machine.peak_flops_per_s
            if self.saver and self.folder:
                self.tell_plan(self.folder, self.saver)
            return self._loop()

        stop, say = self.stop.set, self.screen.say
        with watched(job, self.folder, self.saver, stop, say):
            finished = job.run(anew, self.iterator, self.count, start)
        self.count(job.done)
        return finished, job.done

    def _loop(self) -> Loop:
        saver, last, where = self.saver, self.experiment.steps, position(self.iterator)

        def keep(done: int) -> None:
            assert saver is not None
            asked = done >= last or not saver.due(done)
            saver.write(saver.take(done, where(), asked=asked))

        return Loop(
            engine=Counted(self.job.engine, self.count),
            experiment=self.experiment,
            batches=self.batches,
            meter=self.meter,
            screen=self.screen,
            write=self.tell,
            save=keep if saver else None,
            due=saver.due if saver else None,
            stop=self.stop,
            flag="",
        )
