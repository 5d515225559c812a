"""The list of plans that is committed before any of them is measured.

Judged plans -> Listed -> list.json -> read_list -> Listed

It stands alone: the cluster with its measured figures is in it, and each plan is text.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexijax.cluster import Cluster
from hexijax.costs.compute import MeshShape, time_basis
from hexijax.costs.measured import Basis
from hexijax.errors import UserError
from hexijax.layers.chain import Chain
from hexijax.plan import text
from hexijax.plan.plan import Plan, Stage
from hexijax.report.folder import write_json
from hexijax.report.judged import Judged

FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """One plan and what it was predicted to take."""

    plan: Plan
    """Without a prediction of its own."""

    step_s: float
    """Seconds of a step."""

    memory_bytes: Mapping[str, int] = dataclasses.field(hash=False)
    """Peak by device."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """Plans of one model on one cluster."""

    cell: str
    """Which model and cards, a name in ``cells``."""

    clip: bool
    """Whether steps are clipped by the global norm."""

    cluster: Cluster
    """With the figures that predictions were made from."""

    what: Mapping[str, Any] = dataclasses.field(hash=False)
    """Date, command, seed."""

    promises: Mapping[str, Promise] = dataclasses.field(hash=False)
    """By name."""

    def write(self, path: Path) -> None:
        """As JSON."""
        rows = [
            {
                "name": name,
                "plan": text.render(promise.plan).splitlines(),
                "predicted_s": promise.step_s,
                "promised_bytes": dict(promise.memory_bytes),
            }
            for name, promise in self.promises.items()
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(
            path,
            {
                "format": FORMAT,
                "cell": self.cell,
                "clip": self.clip,
                "what": dict(self.what),
                "plans": rows,
                "cluster": self.cluster.to_json(),
            },
        )


def read_list(path: Path) -> Listed:
    """What ``write`` wrote.

    Raises:
      UserError: the file has another format.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != FORMAT:
        raise UserError(
            f"The list {path} has format {data.get('format')!r}, and {FORMAT} is read "
            "here. Draw it anew: python -m experiments.predicted_plans"
        )
    return Listed(
        cell=data["cell"],
        clip=data["clip"],
        what=data["what"],
        cluster=Cluster.from_json(data["cluster"]),
        promises={
            row["name"]: Promise(
                plan=text.parse("\n".join(row["plan"]), source=row["name"]),
                step_s=row["predicted_s"],
                memory_bytes=row["promised_bytes"],
            )
            for row in data["plans"]
        },
    )


def digest(path: Path) -> str:
    """Of the file: which list a measurement was of."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def read_before(
    before: Path, name: str, ours: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """What an earlier run of the same list has measured.

    Args:
      before: its file.
      name: of the benchmark.
      ours: file and digest of the list.

    Raises:
      UserError: it was of another list.
    """
    rows = json.loads(before.read_text())
    theirs = rows[name]["list"]
    if theirs != ours:
        raise UserError(
            f"{before} has measured the list {theirs['file']} ({theirs['digest']}), "
            f"and {ours['file']} ({ours['digest']}) is asked for. Go on with the same "
            "list, or leave --before out."
        )
    return rows


def promised(judged: Judged) -> Promise:
    """A judged plan as a row of a list."""
    prediction = judged.plan.prediction
    assert prediction is not None, judged.name
    plan = dataclasses.replace(judged.plan, prediction=None, chain="", cluster="")
    return Promise(
        plan=plan, step_s=prediction.step_s, memory_bytes=prediction.memory_bytes
    )


def known_sizes(chain: Chain, cluster: Cluster, stage: Stage, most: int) -> list[int]:
    """Samples of a lane's microbatch, up to ``most``, for which every layer's times
    were measured on the stage's mesh, or lie between measured ones."""
    return [
        samples
        for samples in range(1, most + 1)
        if not _guessed(chain, cluster, stage, samples)
    ]


def check_measured(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """Every layer's times must follow from measured ones.

    Raises:
      UserError: some would be reckoned from the data sheet, or from other microbatches
        alone.
    """
    for replica in plan.replicas:
        for stage in replica.stages:
            samples = replica.microbatch_size // stage.lanes
            count = _guessed(chain, cluster, stage, samples)
            if count:
                kind = cluster.device(stage.devices[0]).kind
                raise UserError(
                    f"{count} of {len(chain.layers)} layers have no measured time on "
                    f"{kind} in {stage.dtype}, tensor degree {stage.tensor}, for "
                    f"microbatches of {samples}: the profile lacks them or is of "
                    "another model, or the chain was traced by another version of JAX. "
                    "Give the chain of the machine that was profiled (--chain), or "
                    "draw there."
                )


def _guessed(chain: Chain, cluster: Cluster, stage: Stage, samples: int) -> int:
    """Layers whose times on the stage's mesh neither were measured nor lie between."""
    mesh = MeshShape(
        profile=cluster.device(stage.devices[0]).profile,
        dtype=stage.dtype,
        lanes=stage.lanes,
        tensor=stage.tensor,
    )
    basis = time_basis(chain, mesh, samples)
    return sum(basis.get(each, 0) for each in (Basis.ROOFLINE, Basis.EXTRAPOLATED))
