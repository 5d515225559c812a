"""The text and JSON forms of all instructions, and what their errors say."""

import contextlib
import copy
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.plan.plan import Place
from hexijax.program.json import from_json, to_json
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import (
    Agree,
    Backward,
    Buffer,
    Forward,
    Free,
    Gather,
    Instruction,
    Join,
    Kind,
    Load,
    Memory,
    Part,
    Prefetch,
    Program,
    ProgramError,
    Read,
    Recv,
    Reduce,
    Send,
    Site,
    Snapshot,
    Sum,
    Update,
    WriteBack,
)
from hexijax.program.text import line, parse, render
from tests.program.examples import make_chain, make_plan, make_stages

A, B = Place("r0.s0"), Place("b/3")
ACT = Buffer(Kind.ACT, A, "L4", 2)
PARAM = Buffer(Kind.PARAM, B, "slice blocks/3", step=1)

LINES = {
    "load r1 #0": Load(replica=1, microbatch=0),
    "forward r0.s0 g1 #2": Forward(place=A, segment=1, microbatches=(2, 3)),
    "forward r0.s0 g0 #0:4 eval": Forward(
        place=A, segment=0, microbatches=(0, 4), grad=False
    ),
    "backward r0.s0 g1 #2 weight": Backward(
        place=A, segment=1, microbatches=(2, 3), part=Part.WEIGHT
    ),
    "send t7 from r0.s0 to b/3": Send(tag=7, source=A, target=B),
    "recv t7 from r0.s0 to b/3": Recv(tag=7, source=A, target=B),
    "gather l0 from r0.s0 to r0.s0,b/3 collective 4096": Gather(
        group="l0", homes=(A,), places=(A, B), path=4096
    ),
    "reduce l0 from r0.s0,b/3 to b/3 collective 64": Reduce(
        group="l0", members=(A, B), homes=(B,), path=64
    ),
    "gather l0 from r0.s0,b/3 to r0.s0": Gather(group="l0", homes=(A, B), places=(A,)),
    "join l0 at b/3": Join(group="l0", place=B),
    "sum l0 at r0.s0": Sum(group="l0", home=A),
    "reduce l0 from r0.s0 to ()": Reduce(group="l0", members=(A,), homes=()),
    "agree norm to r0.s0,b/3": Agree(name="norm", members=(A, B)),
    'update "a group[3]" at b/3': Update(group="a group[3]", home=B),
    "update l0 at b/3 streamed chunk2": Update(
        group="l0", home=B, site=Site.STREAMED, chunk=2
    ),
    "prefetch Act[r0.s0 L4 #2] into pool : Act[r0.s0 L4 #2]~host! -> ": Prefetch(
        buffer=ACT,
        pool="pool",
        reads=(Read(Buffer(Kind.ACT, A, "L4", 2, 0, Memory.HOST), dies=True),),
    ),
    "writeback Param[b/3 slice blocks/3]@1 from pool": WriteBack(
        buffer=PARAM, pool="pool"
    ),
    "snapshot : State[b/3 l0] -> ": Snapshot(
        reads=(Read(Buffer(Kind.STATE, B, "l0")),)
    ),
    "free : Act[r0.s0 L4 #2]! -> ": Free(reads=(Read(ACT, dies=True),)),
}


@pytest.mark.parametrize("text", LINES)
def test_every_instruction_has_its_line(text: str):
    assert line(LINES[text]) == text.strip()


def test_all_of_them_round_trip():
    instructions = tuple(LINES.values())
    program = Program(
        prologue=instructions[:3],
        body=instructions,
        drain=instructions[-1:],
        pools=(("pool", 2), ("a pool", 1)),
    )
    assert parse(render(program)) == program
    assert from_json(json.loads(json.dumps(to_json(program)))) == program


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(place=NAMES, subject=NAMES, pool=NAMES)
def test_any_name_round_trips(place: str, subject: str, pool: str):
    buffer = Buffer(Kind.ACT, Place(place), subject, 3, 1)
    instr = Gather(
        group=subject,
        homes=(Place(place), Place(pool)),
        places=(Place(pool),),
        path=7,
        reads=(Read(buffer, dies=True),),
        writes=(buffer,),
    )
    program = Program(body=(instr,), pools=((pool, 1),))
    assert parse(render(program)) == program
    assert from_json(to_json(program)) == program


SMALL = lower(
    make_plan((make_stages([1, 1]), 2)), make_chain(2), rules=StepRules(clip=True)
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("program 1", "program 9", "format version 9; this hexijax reads version 1"),
        ("forward r0", "forwrd r0", "found 'forwrd', expected an instruction. Did you"),
        ("-> Act[", "-> Atc[", "expected a buffer such as Act[r0.s1 L4 #2]."),
        (" -> ", " ", "found the end of the line, expected '->' or another buffer"),
        (" from r0", " of r0", "column 13: found 'of', expected 'from' and homes"),
        ("g0 #0 :", "g0 #x :", "found '#x', expected a microbatch #2 or a range #2:4"),
        ("\nbody", "\nbdoy", "found 'bdoy', expected an instruction"),
        ("\ndrain", "", "the text ends before the section 'drain'"),
        ("\nprologue", "\n", "expected 'pool', 'leaving' or the section 'prologue'"),
        ("update l0", "update l[0]", "found 'l[0]', expected a group"),
    ],
)
def test_errors_say_where_and_what_belongs_there(old: str, new: str, message: str):
    text = render(SMALL)
    assert old in text
    with pytest.raises(ProgramError) as error:
        parse(text.replace(old, new, 1))
    assert message in str(error.value)


def test_a_caret_stands_under_the_fault():
    with pytest.raises(ProgramError) as error:
        parse("hexijax program 1\nprologue\n  load r0 0\nbody\ndrain")
    assert str(error.value) == (
        "line 3, column 11: found '0', expected # and a number.\n"
        "    load r0 0\n"
        "            ^"
    )


def test_json_errors_name_the_entry():
    data = to_json(SMALL)
    data["body"][0]["replica"] = 0
    with pytest.raises(ProgramError, match=r"body\[0\].replica: found 0, expected r"):
        from_json(data)
    with pytest.raises(ProgramError, match="format version None"):
        from_json({})


@given(seed=st.integers(0, 2**32))
def test_mutated_text_is_refused_or_read(seed: int):
    rng = random.Random(seed)
    text = list(render(SMALL))
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text))
        text[start : start + rng.randint(0, 3)] = rng.choices(
            [*' \n[]#@!~":\\->', "é", "0", "forward", "Act["], k=rng.randint(0, 2)
        )
    with contextlib.suppress(ProgramError):
        parse("".join(text))


@given(seed=st.integers(0, 2**32))
def test_mutated_json_is_refused_or_read(seed: int):
    rng = random.Random(seed)
    data = copy.deepcopy(to_json(SMALL))
    odd = [None, 3, True, "forward", [], {}, ["x"], 1.5]
    where: object = data
    while isinstance(where, dict | list) and where:
        keys = list(where) if isinstance(where, dict) else range(len(where))
        key = rng.choice(keys)
        if rng.random() < 0.3 or not isinstance(where[key], dict | list):
            where[key] = rng.choice(odd)
            break
        where = where[key]
    try:
        program: Program | None = from_json(data)
    except ProgramError:
        program = None
    assert all(isinstance(i, Instruction) for i in program or ())
