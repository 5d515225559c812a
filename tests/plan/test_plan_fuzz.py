"""Damaged plan files end as a plan or as a PlanError, never as anything else."""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hexijax.plan.plan import Plan, PlanError
from hexijax.plan.serial import SavedPlan, loads, save
from hexijax.plan.text import parse, render
from tests.plan.examples import make_chain, make_cluster
from tests.plan.test_plan_text import UNEVEN

TOKENS = [
    *("", "0", "-1", "1e999", "99999999999999999999", "nan", "null", "true", "[]"),
    *('"', "#", ",", "=", "-", "+", "*", "/", "\n", "\x00", "é", "²", "٣", "0-9999999"),
    *("stage", "replica", "none*99999999", "a/0-99999999999", "[[[[[", '{"a":'),
]  # fmt: skip


def mutants(raw: bytes, count: int, seed: int) -> Iterator[bytes]:
    """The file with a few bytes, words or lines changed, lost, doubled or swapped."""
    rng = random.Random(seed)
    words = re.findall(rb"\w+|\s+|[^\w\s]", raw)
    for _ in range(count):
        if rng.random() < 0.4:
            data = bytearray(raw)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(data))
                data[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
            yield bytes(data)
            continue
        changed = list(words)
        for _ in range(rng.randint(1, 3)):
            at, other = rng.randrange(len(changed)), rng.randrange(len(changed))
            new = rng.choice([rng.choice(TOKENS).encode(), changed[other], b""])
            changed[at] = rng.choice([new, changed[at] + new])
        yield b"".join(changed)


def outcomes(read: Callable[[bytes], object], raws: Iterator[bytes]) -> tuple[int, int]:
    """How many were read, and how many refused with an error for people."""
    made = refused = 0
    for raw in raws:
        try:
            result = read(raw)
        except PlanError:
            refused += 1
        else:
            assert isinstance(result, Plan | SavedPlan)
            made += 1
    return made, refused


def test_mutated_texts():
    def read(raw: bytes) -> Plan:
        return parse(raw.decode(errors="replace"))

    made, refused = outcomes(read, mutants(render(UNEVEN).encode(), 6_000, seed=1))
    assert made > 300
    assert refused > 3_000


def test_mutated_json(tmp_path: Path):
    save(tmp_path / "plan.json", UNEVEN, make_cluster(), make_chain(num_blocks=1))
    raw = (tmp_path / "plan.json").read_bytes()
    # Most mutations should hit the plan, which no checksum guards.
    plan_end = raw.index(b'"cluster": {')

    def whole(mutated: Iterator[bytes]) -> Iterator[bytes]:
        return (plan + raw[plan_end:] for plan in mutated)

    made, refused = outcomes(loads, whole(mutants(raw[:plan_end], 4_500, seed=2)))
    assert made > 100
    assert refused > 2_000
    made, refused = outcomes(loads, mutants(raw, 500, seed=3))
    assert refused > 250
