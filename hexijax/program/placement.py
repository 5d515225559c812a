"""Pass 3: what a step does besides computing: load, reduce, sum, update, gather, join.

    Plan, Chain, streams -> prologue, and instructions of the body in no order yet

Their order follows from what they read, so the next pass settles it.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Params, Place, Plan, stage_place
from hexijax.program import names
from hexijax.program.boxes import holders, residence, used_as_it_is
from hexijax.program.buckets import buckets, streams_state, update_site
from hexijax.program.compute import batch_places
from hexijax.program.program import (
    HOST,
    PIECES,
    Agree,
    Buffer,
    Gather,
    Instruction,
    Join,
    Kind,
    Load,
    Memory,
    Read,
    Reduce,
    Site,
    Sum,
    Update,
    WriteBack,
)
from hexijax.program.waiting import prefetch, rest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRules:
    """What an update must know about all gradients."""

    clip: bool = False
    """Gradients are scaled to a largest global norm."""

    skip_nonfinite: bool = False
    """A step whose gradient is not finite leaves parameters and moments alone."""

    dynamic_scale: bool = False
    """So it does, and the scale of the next step's losses follows from it."""

    @property
    def skips(self) -> bool:
        """Whether a step whose gradient is not finite changes nothing."""
        return self.skip_nonfinite or self.dynamic_scale

    @property
    def update_waits(self) -> bool:
        """Whether no update may start before the last gradient is reduced."""
        return self.clip or self.skips


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlaces:
    """Where a bucket of parameters is used and where its state lives."""

    group: str
    users: tuple[Place, ...]
    homes: tuple[Place, ...]
    keepers: tuple[Place, ...]
    """Users that have the parameters all step; others have them for a pass."""

    streamers: tuple[Place, ...] = ()
    """Of those, the ones that get them from a copy of their own in host memory."""

    trainable: bool = True
    """Whether it is reduced, updated and gathered; else it is gathered once."""

    memory: Memory = Memory.DEVICE
    """Where its homes hold the state."""

    site: Site = Site.DEVICE
    """Where they update it."""

    reduce_path: int = PIECES
    """How its gradients go to their homes."""

    gather_path: int = PIECES
    """How new parameters go to those that keep them."""

    @property
    def gathers(self) -> tuple[Place, ...]:
        """Users that get new parameters once a step."""
        return tuple(
            user
            for user in self.users
            if user in self.keepers or user in self.streamers
        )


def group_places(
    plan: Plan,
    chain: Chain,
    groups: Sequence[Group] | None = None,
    *,
    whole_leaves: bool = False,
) -> tuple[GroupPlaces, ...]:
    """Users and homes of every bucket, in the order of the chain."""

    def places(group: Group) -> GroupPlaces:
        homes = holders(plan, chain, group, whole_leaves=whole_leaves)
        has = residence(plan, group)
        return GroupPlaces(
            group=group.name,
            users=tuple(has),
            homes=homes,
            trainable=group.trainable,
            memory=state_memory(plan, chain, group),
            site=update_site(plan, group),
            keepers=tuple(x for x, stays in has.items() if stays is Params.KEPT),
            streamers=tuple(x for x, stays in has.items() if stays is Params.STREAMED),
        )

    groups = buckets(plan, chain) if groups is None else groups
    return tuple(map(places, groups))


def state_memory(plan: Plan, chain: Chain, group: Group) -> Memory:
    """Where a bucket's state rests.

    Masters that do not train are read once, before the first step. Where their home
    computes with them as they are, they are its parameters. Where it computes with a
    cast of them, that cast is all a device needs: what it was made from waits in host
    memory, for whoever exports or saves the model.
    """
    if group.trainable:
        return Memory.HOST if streams_state(plan, group) else Memory.DEVICE
    return Memory.DEVICE if used_as_it_is(plan, chain, group) else Memory.HOST


def prologue(groups: Iterable[GroupPlaces]) -> list[Instruction]:
    """Parameters from their state, for who keeps them; copies leave before any join."""
    made: list[Instruction] = []
    for g in groups:
        state = [names.state(home, g.group, memory=g.memory) for home in g.homes]
        made += [_gather(g, (user,), state) for user in g.gathers]
        made += [_join(g.group, user) for user in g.gathers]
        made += [_rest(g.group, user) for user in g.streamers]
    return made


def loads(
    plan: Plan,
    chain: Chain,
    *,
    evaluation: bool = False,
    rules: StepRules | None = None,
) -> list[Load]:
    """One Load a replica and microbatch."""
    scaled = rules is not None and rules.dynamic_scale and not evaluation
    result: list[Load] = []
    for r, replica in enumerate(plan.replicas):
        places = batch_places(plan, chain, r)
        last = stage_place(r, len(replica.stages) - 1)
        for m in range(replica.microbatches):
            writes = [names.batch(place, m) for place in places]
            reads = []
            if m == 0 and result:
                reads.append(names.WEIGHT)
            if m == 0 and scaled:
                reads.append(names.scale(last))
            if not result:
                writes.append(names.WEIGHT)
            if m == 0 and not evaluation:
                writes.append(names.seed(last))
            result.append(
                Load(
                    reads=_reads(reads),
                    writes=tuple(writes),
                    replica=r,
                    microbatch=m,
                )
            )
    return result


def agree_on_scale(plan: Plan, *, body: bool) -> Instruction:
    """The loss scale to all that multiply by it: the next step's, or the first's."""
    places = last_places(plan)
    step = 1 if body else 0
    writes = [names.scale(place, step) for place in places]
    reads = [names.scale(HOST)]
    if body:
        reads.insert(0, names.agreed(HOST, "norm"))
        writes.insert(0, names.scale(HOST, step))
    return Agree(
        reads=_reads(reads),
        writes=tuple(writes),
        name="scale",
        members=tuple(buffer.place for buffer in writes),
    )


def last_places(plan: Plan) -> list[Place]:
    """Where losses are made, in the order of the replicas."""
    return [
        stage_place(r, len(replica.stages) - 1)
        for r, replica in enumerate(plan.replicas)
    ]


def agree_on_loss(plan: Plan) -> Instruction:
    """Metrics for people: the losses of all microbatches and the weight."""
    losses = [
        names.loss(stage_place(r, len(replica.stages) - 1), m)
        for r, replica in enumerate(plan.replicas)
        for m in range(replica.microbatches)
    ]
    return Agree(
        reads=_reads([*losses, names.WEIGHT]),
        writes=(names.agreed(HOST, "loss"),),
        name="loss",
        members=(HOST,),
    )


def sync(
    groups: Iterable[GroupPlaces],
    streams: Iterable[Iterable[Instruction]],
    rules: StepRules,
    late: Collection[str] = (),
) -> list[Instruction]:
    """Reduce, update and gather of every group that trains, and the gradients' norm.

    Groups that are ``late`` are updated by the next step: see ``renew``.
    """
    groups = tuple(g for g in groups if g.trainable)
    last_grad = {
        (buffer.place, buffer.subject): buffer
        for stream in streams
        for instr in stream
        for buffer in instr.writes
        if buffer.kind is Kind.GRAD
    }
    result: list[Instruction] = []
    for g in groups:
        result.append(_reduce(g, [last_grad[user, g.group] for user in g.users]))
        result += [_sum(g.group, home) for home in g.homes]
        if g.site is Site.HOST:
            result += [rest(names.grad(home, g.group)) for home in g.homes]
        if g.group not in late:
            result += renew(g, rules)
    homes = dict.fromkeys(home for g in groups for home in g.homes)
    members = (*homes, HOST) if rules.update_waits else (HOST,)
    norms = [names.group_norm(home, g.group) for g in groups for home in g.homes]
    if rules.dynamic_scale:
        norms.append(names.scale(HOST))
    result.append(
        Agree(
            reads=_reads(norms),
            writes=tuple(names.agreed(member, "norm") for member in members),
            name="norm",
            members=members,
        )
    )
    return result


def renew(g: GroupPlaces, rules: StepRules, step: int = 0) -> list[Instruction]:
    """Update and gather with the gradients of a step; -1: of the one before."""
    result = [i for home in g.homes for i in _update(g, home, rules, step)]
    slices = [names.param_slice(home, g.group) for home in g.homes]
    if g.site is Site.HOST:
        slices = list(map(names.on_host, slices))
    result += _gathers(g, slices)
    result += [_join(g.group, user, step=step + 1) for user in g.gathers]
    result += [_rest(g.group, user, step=step + 1) for user in g.streamers]
    return result


def _reduce(g: GroupPlaces, grads: list[Buffer]) -> Reduce:
    return Reduce(
        reads=_reads(grads),
        writes=tuple(names.grad_pieces(home, g.group) for home in g.homes),
        group=g.group,
        members=g.users,
        homes=g.homes,
        path=g.reduce_path,
    )


def _sum(group: str, home: Place) -> Sum:
    return Sum(
        reads=(Read(names.grad_pieces(home, group), True),),
        writes=(names.grad(home, group), names.group_norm(home, group)),
        group=group,
        home=home,
    )


def _update(
    g: GroupPlaces, home: Place, rules: StepRules, step: int
) -> list[Instruction]:
    """One, or with the state's way from the host and back."""
    group, on_host = g.group, g.site is Site.HOST
    state = names.state(home, group, step)
    reads = [state, names.grad(home, group)._replace(step=step)]
    if on_host:
        reads = list(map(names.on_host, reads))
    if rules.update_waits:
        reads.append(names.agreed(home, "norm")._replace(step=step))
    writes = [names.state(home, group, step=step + 1)]
    if g.gathers:
        writes.append(names.param_slice(home, group))
    if on_host:
        writes = list(map(names.on_host, writes))
    update = Update(
        reads=_reads(reads),
        writes=tuple(writes),
        group=group,
        home=home,
        site=g.site,
    )
    if g.site is not Site.STREAMED:
        return [update]
    return [prefetch(state), update, rest(writes[0])]


def _gathers(g: GroupPlaces, slices: Sequence[Buffer]) -> list[Gather]:
    """One for each that gets them; a collective is one for all."""
    if g.gather_path == PIECES:
        return [_gather(g, (user,), slices) for user in g.gathers]
    return [_gather(g, g.gathers, slices, g.gather_path)]


def _gather(
    g: GroupPlaces,
    users: tuple[Place, ...],
    slices: Iterable[Buffer],
    path: int = PIECES,
) -> Gather:
    return Gather(
        reads=_reads(slices),
        writes=tuple(names.param_pieces(user, g.group) for user in users),
        group=g.group,
        homes=g.homes,
        places=users,
        path=path,
    )


def _join(group: str, user: Place, step: int = 0) -> Join:
    return Join(
        reads=(Read(names.param_pieces(user, group), True),),
        writes=(names.param(user, group, step=step),),
        group=group,
        place=user,
    )


def _rest(group: str, user: Place, step: int = 0) -> WriteBack:
    """Parameters to where they rest between passes."""
    return rest(names.param(user, group, step=step))


def _reads(buffers: Iterable[Buffer]) -> tuple[Read, ...]:
    return tuple(Read(buffer) for buffer in buffers)
