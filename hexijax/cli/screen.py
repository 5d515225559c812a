"""What a person sees of a search, while it goes on."""

import contextlib
import math
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hexijax.report.words import seconds


class Searching:
    """Says on stderr what a planning command is doing; its figures go to stdout."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Prints ``text`` as it is."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def on(self, what: str) -> Generator[Callable[[str, float], None] | None]:
        """Shows ``what`` with a clock while the block runs, on a terminal only.

        Gives what a search tells its progress to: what it does, and its best step.
        """
        if not self.console.is_terminal:
            yield None
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(what, total=None)

            def tell(doing: str, best_s: float) -> None:
                best = f", best {seconds(best_s)}" if math.isfinite(best_s) else ""
                progress.update(task, description=f"{what}: {doing}{best}")

            yield tell
