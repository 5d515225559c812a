"""Text to Plan: the other half of ``text``."""

import enum
import re
from collections.abc import Callable, Mapping
from typing import Any

from hexijax.layers.chain import Remat
from hexijax.plan.limits import MAX_LAYERS
from hexijax.plan.lines import Line
from hexijax.plan.plan import (
    FORMAT_VERSION,
    Memory,
    Params,
    Place,
    Plan,
    PlanError,
    Prediction,
    Reductions,
    Replica,
    Schedule,
    Stage,
    StateShare,
    UpdateOrder,
)

Fields = dict[str, Any]
Reader = Callable[[Line], Any]


def parse(text: str, source: str = "plan") -> Plan:
    """The plan that ``render`` wrote, or a person after it.

    Args:
      text: the whole file.
      source: name of the file, for errors.

    Raises:
      PlanError: with the line, what was found and what is expected.
    """
    return _Parser(source).parse(text)


class _Parser:
    """Collects the facts of a plan, a line at a time."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.settings: Fields = {}
        self.replicas: list[tuple[Line, Fields, list[Stage]]] = []
        self.state: list[StateShare] = []
        self.step_s: float | None = None
        self.memory_bytes: dict[str, int] = {}

    def parse(self, text: str) -> Plan:
        lines = [
            Line(row, number, self.source)
            for number, row in enumerate(text.split("\n"), start=1)
        ]
        lines = [line for line in lines if line]
        if not lines:
            raise PlanError(
                f"{self.source} is empty. A plan starts with 'hexijax plan "
                f"{FORMAT_VERSION}'; `hexijax plan EXPERIMENT` writes one."
            )
        self._header(lines[0])
        for line in lines[1:]:
            word = line.choice(
                ["replica", "stage", "state", "predicted", *_SETTINGS],
                "a line that starts with one of",
            )
            {
                "replica": self._replica,
                "stage": self._stage,
                "state": self._state,
                "predicted": self._predicted,
            }.get(word, self._setting)(line)
            line.end()
        return self._plan()

    def _header(self, line: Line) -> None:
        expected = f"the header 'hexijax plan {FORMAT_VERSION}'"
        if line.word(expected) != "hexijax" or line.word(expected) != "plan":
            line.fail(expected, line.last)
        if line.whole("the format version") != FORMAT_VERSION:
            line.fail(
                f"format version {FORMAT_VERSION}, the one this hexijax reads",
                line.last,
            )
        line.end()

    def _setting(self, line: Line) -> None:
        name = line.last.text
        if name in self.settings:
            line.fail(f"'{name}' once", line.last)
        self.settings[name] = _SETTINGS[name](line)

    def _replica(self, line: Line) -> None:
        self._count(line, "replica", len(self.replicas))
        self.replicas.append((line, _fields(line, _REPLICA), []))

    def _stage(self, line: Line) -> None:
        if not self.replicas:
            line.fail("a 'replica' line before the first stage", line.last)
        stages = self.replicas[-1][2]
        self._count(line, "stage", len(stages))
        fields = _fields(line, _STAGE)
        for name in ("devices", "layers"):
            if name not in fields:
                line.fail(f"'{name}' of the stage")
        policies = fields.pop("remat", Remat.NONE)
        if isinstance(policies, Remat):
            start, stop = fields["layers"]
            policies = (policies,) * (stop - start)
        number = len(fields.get("segments", (1,)))
        for name in ("params", "waits", "residuals"):
            choice = fields.get(name, ())
            if isinstance(choice, enum.StrEnum):
                fields[name] = (choice,) * number
        stages.append(Stage(**fields, remat=policies))

    def _count(self, line: Line, what: str, expected: int) -> None:
        """Numbers are for the reader: they must come in order, or a line is lost."""
        if line.whole(f"the {what}'s number") != expected:
            line.fail(f"{what} {expected}: they are numbered in order", line.last)

    def _state(self, line: Line) -> None:
        groups = line.names("names of parameter groups, or *,")
        if line.next.text == "even" and line.next.kind == "word":
            line.word("even")
            self._add_state(line, groups, {})
            return
        shares: dict[Place, float] = {}
        while True:
            places = line.name("'even', or places such as r0.s0=0.5")
            for place in places:
                if place in shares:
                    line.fail(f"the share of {place} once", line.last)
            if not line.mark("="):
                line.fail("'=' and the share of that place")
            share = line.decimal(f"the share of {', '.join(places[:3])}")
            shares |= dict.fromkeys(map(Place, places), share)
            if not line.mark(","):
                break
        self._add_state(line, groups, shares)

    def _add_state(
        self, line: Line, groups: tuple[str, ...], shares: dict[Place, float]
    ) -> None:
        where = _fields(line, _STATE)
        self.state.append(StateShare(groups=groups, shares=shares, **where))

    def _predicted(self, line: Line) -> None:
        what = line.choice(["step_s", "memory_bytes"], "one of")
        if what == "step_s":
            if self.step_s is not None:
                line.fail("'predicted step_s' once", line.last)
            self.step_s = line.decimal("step_s")
            return
        num_bytes = line.whole("memory_bytes")
        line.choice(["devices"], "the word")
        for device in line.names("devices"):
            if device in self.memory_bytes:
                line.fail(f"the memory of {device} once", line.last)
            self.memory_bytes[device] = num_bytes

    def _plan(self) -> Plan:
        if not self.replicas:
            raise PlanError(
                f"{self.source} has no 'replica' line. A plan has at least one replica "
                "with one stage."
            )
        replicas = tuple(_replica(*found) for found in self.replicas)
        if "batch" not in self.settings:
            raise PlanError(
                f"{self.source} has no 'batch' line. The stages take "
                f"{sum(r.samples for r in replicas)} samples together: if that is the "
                "global batch, write it so."
            )
        prediction = None
        if self.step_s is not None:
            prediction = Prediction(step_s=self.step_s, memory_bytes=self.memory_bytes)
        elif self.memory_bytes:
            raise PlanError(
                f"{self.source} has predicted memory but no 'predicted step_s' line. "
                "Give both or neither."
            )
        settings = dict(self.settings)
        if self.state:
            settings["state"] = tuple(self.state)
        return Plan(
            replicas=replicas,
            batch_size=settings.pop("batch"),
            prediction=prediction,
            **settings,
        )


def _replica(line: Line, fields: Mapping[str, int], stages: list[Stage]) -> Replica:
    if not stages:
        line.fail("a 'stage' line after the replica's", line.last)
    for name in ("microbatches", "size"):
        if name not in fields:
            line.fail(f"'{name}' of the replica")
    full = fields["microbatches"] * fields["size"]
    return Replica(
        stages=tuple(stages),
        microbatches=fields["microbatches"],
        microbatch_size=fields["size"],
        samples=fields.get("samples", full),
    )


def _fields(line: Line, readers: Mapping[str, Reader]) -> Fields:
    """``name value name value ...`` in any order, each name at most once."""
    fields: Fields = {}
    while line:
        name = line.choice(readers, "one of")
        if name in fields:
            line.fail(f"'{name}' once", line.last)
        fields[name] = readers[name](line)
    return fields


def _whole(name: str) -> Reader:
    return lambda line: line.whole(name)


def _string(name: str) -> Reader:
    def read(line: Line) -> str:
        names = line.name(name)
        return names[0] if len(names) == 1 else line.fail(name, line.last)

    return read


def _layers(line: Line) -> tuple[int, int]:
    """First and last layer, both in the stage; one number is a stage of one layer."""
    numbers = line.numbers("a range of layers", "-", "0-3")
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 or last < first:
        line.fail("a range of layers upwards, first and last, such as 0-3", line.last)
    if last >= MAX_LAYERS:
        line.fail(f"layers below {MAX_LAYERS}", line.last)
    return first, last + 1


def _runs(kind: type[enum.StrEnum], expected: str) -> Reader:
    """One choice for every layer or segment, or a tuple with each one's."""

    def read(line: Line) -> enum.StrEnum | tuple[enum.StrEnum, ...]:
        chosen: list[enum.StrEnum] = []
        counted = False
        while True:
            word = line.word(expected)
            name, star, count = word.partition("*")
            if name not in list(kind):
                line.fail(f"one of {', '.join(kind)}", line.last, list(kind))
            if star and not re.fullmatch("[0-9]{1,6}", count):
                line.fail(expected, line.last)
            chosen += [kind(name)] * (int(count) if star else 1)
            counted = counted or bool(star)
            if len(chosen) > MAX_LAYERS:
                line.fail(f"at most {MAX_LAYERS} layers", line.last)
            if not line.mark(","):
                break
        if len(chosen) == 1 and not counted:
            return chosen[0]
        return tuple(chosen)

    return read


_SETTINGS: dict[str, Reader] = {
    "objective": _string("an objective"),
    "batch": _whole("the global batch size"),
    "schedule": lambda line: Schedule(line.choice(Schedule, "a schedule")),
    "reductions": lambda line: Reductions(line.choice(Reductions, "one of")),
    "order": lambda line: UpdateOrder(line.choice(UpdateOrder, "one of")),
    "chunk": _whole("parameters of a chunk of state"),
    "cluster": _string("the cluster's fingerprint"),
    "chain": _string("the chain's fingerprint"),
}

_REPLICA: dict[str, Reader] = {
    "microbatches": _whole("the number of microbatches"),
    "size": _whole("the microbatch size"),
    "samples": _whole("the replica's samples"),
}

_STAGE: dict[str, Reader] = {
    "devices": lambda line: line.names("devices"),
    "lanes": _whole("lanes"),
    "tensor": _whole("the tensor degree"),
    "dtype": _string("a dtype"),
    "layers": _layers,
    "segments": lambda line: line.numbers("segments", "+", "2+2"),
    "remat": _runs(Remat, "a remat policy such as none, or none*3,full"),
    "params": _runs(Params, "how long parameters stay: kept, or kept,freed*3"),
    "waits": _runs(Memory, "where borders wait: host, or device,host*3"),
    "residuals": _runs(Memory, "where residuals wait: host, or device,host*3"),
    "grads": _whole("passes whose gradients are there at once"),
    "leaving": _whole("chunks of state on their way to the host"),
}

_STATE: dict[str, Reader] = {
    name: lambda line: Memory(line.choice(Memory, "one of"))
    for name in ("memory", "update")
}
