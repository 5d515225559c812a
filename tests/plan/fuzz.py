"""Reads thousands of damaged plan files; run by ``test_plan_fuzz``.

    python -m tests.plan.fuzz FOLDER

Anything but a plan or a PlanError ends it with a traceback.
"""

import json
import random
import re
import sys
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


def fuzz_text(count: int) -> tuple[int, int]:
    """Mutations of plan.txt."""
    raws = mutants(render(UNEVEN).encode(), count, seed=1)
    return outcomes(lambda raw: parse(raw.decode(errors="replace")), raws)


def fuzz_json(path: Path, count: int) -> tuple[int, int]:
    """Mutations of plan.json, most of them in the plan, which no checksum guards."""
    save(path, UNEVEN, make_cluster(), make_chain(num_blocks=1))
    raw = path.read_bytes()
    plan, rest = raw.split(b'"cluster": {', 1)
    in_plan = (
        mutant + b'"cluster": {' + rest
        for mutant in mutants(plan, count * 9 // 10, seed=2)
    )
    made, refused = outcomes(loads, in_plan)
    anywhere = outcomes(loads, mutants(raw, count // 10, seed=3))
    return made + anywhere[0], refused + anywhere[1]


if __name__ == "__main__":
    results = {
        "text": fuzz_text(6_000),
        "json": fuzz_json(Path(sys.argv[1]) / "plan.json", 5_000),
    }
    print(json.dumps(results))
