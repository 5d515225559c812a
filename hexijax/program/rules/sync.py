"""Every gradient enters one Reduce and one Sum a home; every group is updated at each
home, once, and its new parameters reach each user: at once, or for each pass."""

from collections.abc import Sequence

from hexijax.plan.plan import Place, Reductions
from hexijax.program import names
from hexijax.program.placement import GroupPlaces
from hexijax.program.program import (
    HOST,
    PIECES,
    Agree,
    Buffer,
    Gather,
    Join,
    Kind,
    Program,
    Reduce,
    Site,
    Sum,
    Update,
)
from hexijax.program.rules.facts import Facts, numbered
from hexijax.program.rules.fault import Faults


def check_sync(program: Program, facts: Facts, faults: Faults) -> None:
    """Reduce, Update, Gather and Agree of one body; the Gathers of the prologue."""
    _check_agrees(program, facts, faults)
    _check_gathers(program, facts, faults, "prologue")
    _check_ends(program, faults, "prologue")
    _check_ends(program, faults, "body")
    _check_gathers(program, facts, faults, "body")
    if facts.trains:
        _check_reduces(program, facts, faults)
        _check_updates(program, facts, faults)


def _check_reduces(program: Program, facts: Facts, faults: Faults) -> None:
    last: dict[tuple[Place, str], Buffer] = {}
    seen: set[str] = set()
    for _, instr in numbered(program):
        for buffer in instr.writes:
            if buffer.kind is Kind.GRAD and buffer.microbatch is not None:
                last[buffer.place, buffer.subject] = buffer
    for position, instr in numbered(program):
        if not isinstance(instr, Reduce):
            continue
        group = _group(position, instr.group, facts, faults)
        _check_trains(position, group, faults)
        if instr.group in seen:
            faults.at(position, f"Group {instr.group} is reduced twice in a body.")
        seen.add(instr.group)
        _check_places(position, "members", instr.members, group.users, faults)
        _check_places(position, "homes", instr.homes, group.homes, faults)
        expected = [last.get((member, instr.group)) for member in instr.members]
        found = [read.buffer for read in instr.reads]
        if found != expected:
            faults.at(
                position,
                f"It must read the complete gradient of each member in their order: "
                f"{_names(expected)}. Every backward's gradient enters exactly one "
                "Reduce.",
            )
        _check_path(position, instr, instr.members, facts, faults)
        writes = {names.grad_pieces(home, instr.group) for home in instr.homes}
        if set(instr.writes) != writes:
            faults.at(position, "It must write Pieces of the gradient at each home.")
    for name in facts.groups:
        if name not in seen and facts.groups[name].trainable:
            faults.missing(
                f"Group {name} is never reduced. The gradients of all its users "
                f"({_names(facts.groups[name].users)}) enter one Reduce a step."
            )


def _check_ends(program: Program, faults: Faults, section: str) -> None:
    """A Sum ends a Reduce at one home, a Join a Gather at one user."""
    for position, instr in numbered(program, section):
        if isinstance(instr, Sum):
            reads = names.grad_pieces(instr.home, instr.group)
            writes = (
                names.grad(instr.home, instr.group),
                names.group_norm(instr.home, instr.group),
            )
        elif isinstance(instr, Join):
            step, count = 0, None
            if instr.writes:
                step, count = instr.writes[0].step, instr.writes[0].microbatch
            reads = names.param_pieces(instr.place, instr.group, count)
            writes = (names.param(instr.place, instr.group, step, count),)
        else:
            continue
        if [read.buffer for read in instr.reads] != [reads] or instr.writes != writes:
            faults.at(position, f"It must read {reads} and write {_names(writes)}.")


def _check_updates(program: Program, facts: Facts, faults: Faults) -> None:
    done: dict[tuple[str, Place], list[int]] = {}
    waiting: list[bool] = []
    for position, instr in numbered(program):
        if not isinstance(instr, Update):
            continue
        group = _group(position, instr.group, facts, faults)
        _check_trains(position, group, faults)
        if instr.home not in group.homes:
            faults.at(
                position,
                f"{instr.home} is no home of group {instr.group}; those are "
                f"{_names(group.homes)}.",
            )
        chunks = done.setdefault((instr.group, instr.home), [])
        if instr.chunk in chunks:
            faults.at(
                position,
                f"Group {instr.group} is updated twice at {instr.home} in one step.",
            )
        chunks.append(instr.chunk)
        # A late one reads what the step before left.
        reads = {read.buffer._replace(step=0) for read in instr.reads}
        due = names.grad(instr.home, instr.group)
        made_slice = names.param_slice(instr.home, instr.group)
        if instr.site is not group.site:
            faults.at(
                position,
                f"Group {group.group} is updated at site {group.site} by the plan, and "
                f"here at site {instr.site}.",
            )
        if instr.site is Site.HOST:
            due, made_slice = names.on_host(due), names.on_host(made_slice)
        if due not in reads:
            faults.at(position, "An Update reads the reduced gradient at its home.")
        made = made_slice in instr.writes
        if made != bool(group.gathers):
            faults.at(
                position,
                f"Group {instr.group} is kept by {_names(group.gathers)}: an Update "
                "writes its Param slice where a user keeps the parameters, and nowhere "
                "else.",
            )
        waiting.append(names.agreed(instr.home, "norm") in reads)
        if facts.scaled and not waiting[-1]:
            faults.at(
                position,
                "An update under a dynamic loss scale waits for the norm of all "
                "gradients: it divides by the scale, or is skipped.",
            )
        if waiting[-1] != waiting[0]:
            faults.at(
                position,
                "Some updates wait for the norm of all gradients and some do not. "
                "Clipping and skipping are global: all wait, or none.",
            )
    for group in facts.groups.values():
        for home in group.homes if group.trainable else ():
            chunks = done.get((group.group, home), [])
            if not chunks or sorted(chunks) != list(range(len(chunks))):
                faults.missing(
                    f"Group {group.group} has updates {chunks} at its home {home}. "
                    "Each home updates its boxes once a step, in chunks counted from 0."
                )


def _check_gathers(
    program: Program, facts: Facts, faults: Faults, section: str
) -> None:
    seen: set[tuple[str, Place]] = set()
    for position, instr in numbered(program, section):
        if not isinstance(instr, Gather):
            continue
        group = _group(position, instr.group, facts, faults)
        if section == "body":
            _check_trains(position, group, faults)
        _check_places(position, "homes", instr.homes, group.homes, faults)
        _check_path(position, instr, instr.places, facts, faults)
        count = instr.writes[0].microbatch if instr.writes else None
        for place in instr.places:
            _check_user(position, group, place, count, section, faults)
        written = tuple(
            names.param_pieces(place, instr.group, count) for place in instr.places
        )
        anew = section == "body" and count is None
        make = names.param_slice if anew else names.state
        wanted = [make(home, instr.group) for home in instr.homes]
        # State may be read where it lives, so memory does not count.
        found = [(r.buffer.kind, r.buffer.place, r.buffer.subject) for r in instr.reads]
        due = [(b.kind, b.place, b.subject) for b in wanted]
        if found != due or instr.writes != written:
            faults.at(
                position,
                f"It must read {_names(wanted)} and write {_names(written)}.",
            )
        seen |= {(instr.group, place) for place in instr.places}
    if section == "body" and not facts.trains:
        return
    for group in facts.groups.values():
        once = section == "body" and not group.trainable
        for user in () if once else group.gathers:
            if (group.group, user) not in seen:
                faults.missing(
                    f"The {section} never gathers group {group.group} for {user}. New "
                    f"parameters reach every user: {_names(group.gathers)}."
                )


def _check_user(
    position: int,
    group: GroupPlaces,
    place: Place,
    count: int | None,
    section: str,
    faults: Faults,
) -> None:
    """``count``: of the place's pass that parameters are gathered for."""
    if place not in group.users:
        faults.at(
            position,
            f"{place} does not use group {group.group}; its users are "
            f"{_names(group.users)}.",
        )
    keeps = place in group.gathers
    if keeps is not (count is None) or (not keeps and section == "prologue"):
        faults.at(
            position,
            f"{place} {'keeps' if keeps else 'frees'} the parameters of "
            f"{group.group}. Kept ones are gathered once a step, freed ones in the "
            "body for each of its passes, counted from 0.",
        )


def _check_path(
    position: int,
    instr: Reduce | Gather,
    places: Sequence[Place],
    facts: Facts,
    faults: Faults,
) -> None:
    """By pieces to one place, by a collective to all users."""
    if instr.path == PIECES:
        if isinstance(instr, Gather) and len(places) != 1:
            faults.at(
                position,
                f"By pieces each user has a Gather of its own; this one serves "
                f"{_names(places)}.",
            )
        return
    users = facts.groups[instr.group].users
    wide = [place for place in users if len(facts.plan.stage(place).devices) > 1]
    if wide or sorted(places) != sorted(users) or len(users) < 2:
        faults.at(
            position,
            f"A collective runs over all users of group {instr.group}, two or more "
            f"stages of one device each; this one runs over {_names(places)}, and the "
            f"users are {_names(users)}.",
        )
    exact = facts.plan.reductions is Reductions.EXACT
    if isinstance(instr, Reduce) and exact:
        faults.at(
            position,
            "The plan's reductions are exact: they add in the order of the members, "
            "and a collective in its own. Reduce by pieces, or plan for fast ones.",
        )


def _check_agrees(program: Program, facts: Facts, faults: Faults) -> None:
    due = {"loss", "norm"} if facts.trains else {"loss"}
    if facts.scaled:
        due.add("scale")
        _check_scales(program, facts, faults)
    scalars = [
        buffer
        for _, instr in numbered(program)
        for buffer in instr.writes
        if buffer.kind is Kind.SCALAR
    ]
    for position, instr in numbered(program):
        if not isinstance(instr, Agree):
            continue
        if instr.name not in due:
            faults.at(
                position,
                f"A body agrees once on {' and on '.join(sorted(due))}; this is one "
                "more, or another name.",
            )
        due.remove(instr.name)
        reads = {read.buffer for read in instr.reads}
        for scalar in scalars:
            own = scalar.subject == "loss" and scalar.microbatch is not None
            own = own or scalar == names.WEIGHT
            if instr.name == "norm":
                own = scalar.subject.startswith("norm ")
            own = own and instr.name != "scale"
            if own and scalar not in reads:
                faults.at(
                    position, f"It leaves out {scalar}; a sum over places has them all."
                )
        if instr.name == "norm" and facts.scaled and names.scale(HOST) not in reads:
            faults.at(position, f"It leaves out {names.scale(HOST)}, which it undoes.")
        step = 1 if instr.name == "scale" else 0
        writes = {
            names.agreed(member, instr.name)._replace(step=step)
            for member in instr.members
        }
        if set(instr.writes) != writes or HOST not in instr.members:
            faults.at(
                position,
                f"It must write Scalar {instr.name} at each member; the host is one.",
            )
    if due:
        faults.missing(f"The body never agrees on {' and '.join(sorted(due))}.")


def _check_scales(program: Program, facts: Facts, faults: Faults) -> None:
    """The first scale reaches all who multiply by it, and so does each that follows."""
    norm, scale = names.agreed(HOST, "norm"), names.scale(HOST)
    for section, reads, members in (
        ("prologue", [scale], facts.last_places),
        ("body", [norm, scale], (HOST, *facts.last_places)),
    ):
        agrees = [
            (position, instr)
            for position, instr in numbered(program, section)
            if isinstance(instr, Agree) and instr.name == "scale"
        ]
        if len(agrees) != 1:
            faults.missing(
                f"The {section} agrees {len(agrees)} times on the loss scale; it does "
                "so once."
            )
        ((position, instr),) = agrees
        found = [read.buffer for read in instr.reads]
        if found != reads:
            faults.at(position, f"It must read {_names(reads)}.")
        if any(read.dies and read.buffer == norm for read in instr.reads):
            faults.at(position, f"{norm} is a result of the step and must stay.", norm)
        _check_places(position, "members", instr.members, members, faults)


def _group(position: int, name: str, facts: Facts, faults: Faults) -> GroupPlaces:
    if name not in facts.groups:
        faults.at(position, f"The chain has no parameter group {name!r}.")
    return facts.groups[name]


def _check_trains(position: int, group: GroupPlaces, faults: Faults) -> None:
    if not group.trainable:
        faults.at(
            position,
            f"Group {group.group} does not train: it has no gradient and no update, "
            "and its users have it from the prologue.",
        )


def _check_places(
    position: int,
    what: str,
    found: Sequence[Place],
    expected: Sequence[Place],
    faults: Faults,
) -> None:
    if sorted(found) != sorted(expected):
        faults.at(
            position,
            f"Its {what} are {_names(found)}; the plan has {_names(expected)}.",
        )


def _names(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"
