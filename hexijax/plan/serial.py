"""A plan as JSON: for programs to read, and a file that stands alone.

    Plan <-> to_json, from_json          the plan as plain dicts
    SavedPlan <-> save, load             plan.json, which needs nothing beside it

``replicas`` has one form everywhere (plan.json, report.json, ``plan --json``): a list
of replicas, each with its microbatches and its stages.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.layers.chain import FORMAT_VERSION as CHAIN_VERSION
from hexijax.layers.chain import Chain
from hexijax.plan.decode import decode, fail
from hexijax.plan.limits import MAX_LAYERS
from hexijax.plan.plan import FORMAT_VERSION, Memory, Params, Plan, PlanError, Stage
from hexijax.plan.training import PLAIN, Training

_NAMES = {
    Stage: {"layers": "layer_range", "lanes": "data_degree", "tensor": "tensor_degree"}
}
_WAY_OUT = "Write a new one with `hexijax plan`, or edit plan.txt instead."


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedPlan:
    """What a plan.json holds."""

    plan: Plan
    """The plan."""

    cluster: Cluster
    """The cluster it was made for."""

    chain: Chain
    """The model it was made for."""

    training: Training = PLAIN
    """The training it was made for."""


def report_replicas(plan: Plan) -> list[dict[str, Any]]:
    """The replicas as plain dicts, the form of every report.

    A stage has ``layers`` (how many), ``layer_range`` (the first, and the one past the
    last), ``tensor_degree``, ``data_degree``, ``devices``, ``dtype``, ``segments``,
    ``remat``, ``params``, ``waits`` and ``residuals`` (one a segment), ``grads``
    (passes; 0: all) and ``leaving`` (chunks; 0: the fewest); a replica has ``stages``,
    ``microbatches``, ``microbatch_size`` (samples over all lanes) and ``samples``.
    """
    return [
        {
            "stages": [_report_stage(stage) for stage in replica.stages],
            "microbatches": replica.microbatches,
            "microbatch_size": replica.microbatch_size,
            "samples": replica.samples,
        }
        for replica in plan.replicas
    ]


def _report_stage(stage: Stage) -> dict[str, Any]:
    return {
        "layers": stage.num_layers,
        "layer_range": list(stage.layers),
        "tensor_degree": stage.tensor,
        "data_degree": stage.lanes,
        "devices": list(stage.devices),
        "dtype": stage.dtype,
        "segments": list(stage.segments),
        "remat": [policy.value for policy in stage.remat],
        "params": [each.value for each in _params(stage)],
        "waits": [each.value for each in _each(stage.waits, stage)],
        "residuals": [each.value for each in _each(stage.residuals, stage)],
        "grads": stage.grads,
        "leaving": stage.leaving,
    }


def _params(stage: Stage) -> tuple[Params, ...]:
    return stage.params or (Params.KEPT,) * len(stage.segments)


def _each(named: tuple[Memory, ...], stage: Stage) -> tuple[Memory, ...]:
    return named or (Memory.DEVICE,) * len(stage.segments)


def to_json(plan: Plan) -> dict[str, Any]:
    """Plain dicts, lists, strings and numbers; ``from_json`` undoes it exactly."""
    prediction = plan.prediction
    return {
        "version": FORMAT_VERSION,
        "objective": plan.objective,
        "batch_size": plan.batch_size,
        "schedule": plan.schedule.value,
        "reductions": plan.reductions.value,
        "order": plan.order.value,
        "chunk": plan.chunk,
        "cluster": plan.cluster,
        "chain": plan.chain,
        "replicas": report_replicas(plan),
        "state": [
            {
                "groups": list(share.groups),
                "shares": dict(share.shares),
                "memory": share.memory.value,
                "update": share.update.value,
            }
            for share in plan.state
        ],
        "prediction": prediction
        and {
            "step_s": prediction.step_s,
            "memory_bytes": dict(prediction.memory_bytes),
        },
    }


def from_json(data: Any, source: str = "plan") -> Plan:
    """The plan that ``to_json`` wrote.

    Raises:
      PlanError: with the path to the value that is wrong.
    """
    if not isinstance(data, dict):
        fail(source, "an object {...}", data)
    data = dict(data)
    _version(data.pop("version", None), FORMAT_VERSION, source)
    data["replicas"] = [
        {**replica, "stages": _stages(replica, f"{source}.replicas[{r}]")}
        for r, replica in enumerate(
            _objects(data.get("replicas"), f"{source}.replicas")
        )
    ]
    return decode(Plan, data, source, _NAMES)


def _stages(replica: Mapping[str, Any], where: str) -> list[Any]:
    """The replica's stages without ``layers``, which ``layer_range`` says already."""
    stages: list[Any] = []
    for s, stage in enumerate(_objects(replica.get("stages"), f"{where}.stages")):
        place = f"{where}.stages[{s}]"
        span = stage.get("layer_range")
        if (
            not isinstance(span, list)
            or len(span) != 2
            or any(type(end) is not int for end in span)
            or not 0 <= span[0] < span[1] <= MAX_LAYERS
        ):
            fail(f"{place}.layer_range", "[first, one past the last]", span)
        count = stage.get("layers", span[1] - span[0])
        if count != span[1] - span[0]:
            fail(
                f"{place}.layers",
                f"{span[1] - span[0]}, as in layer_range {span}",
                count,
            )
        stages.append({key: value for key, value in stage.items() if key != "layers"})
    return stages


def _objects(data: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        fail(where, "a list of objects [{...}, ...]", data)
    if not data:
        fail(where, "at least one", data)
    return data


def _version(found: Any, ours: int, source: str) -> None:
    if type(found) is not int or found != ours:
        raise PlanError(
            f"{source} has format version {str(found)[:20]!r}; this hexijax reads "
            f"version {ours}. {_WAY_OUT}"
        )


def save(
    path: Path,
    plan: Plan,
    cluster: Cluster,
    chain: Chain,
    training: Training | None = None,
) -> None:
    """Writes plan.json: the plan with its cluster, its model and its training.

    The file appears whole or not at all.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(dumps(plan, cluster, chain, training))
    unfinished.replace(path)


def dumps(
    plan: Plan, cluster: Cluster, chain: Chain, training: Training | None = None
) -> str:
    """The text of a plan.json."""
    parts = {"cluster": cluster.to_json(), "chain": chain.to_json()}
    document = {
        "version": FORMAT_VERSION,
        "plan": to_json(plan),
        "training": dataclasses.asdict(training or PLAIN),
        **parts,
        "sha256": {name: _digest(part) for name, part in parts.items()},
    }
    return json.dumps(document, indent=1) + "\n"


def load(path: Path) -> SavedPlan:
    """What ``save`` wrote; the plan belongs to the cluster and chain beside it.

    Raises:
      PlanError: no such file, or damaged, or of another version.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise PlanError(
            f"Cannot read the plan {path}: {error.strerror}. `hexijax plan EXPERIMENT` "
            "writes one."
        ) from None
    return loads(raw, source=path.name)


def loads(raw: bytes, source: str = "plan.json") -> SavedPlan:
    """``load`` of a file's bytes."""
    try:
        document = json.loads(raw.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        text = "too deeply nested" if isinstance(error, RecursionError) else error
        raise PlanError(f"{source} is not JSON: {text}. {_WAY_OUT}") from None
    if not isinstance(document, dict):
        fail(source, "an object {...}", document)
    _version(document.get("version"), FORMAT_VERSION, source)
    digests = document.get("sha256")
    for name in ("cluster", "chain"):
        if not isinstance(digests, dict) or digests.get(name) != _digest(
            document.get(name)
        ):
            raise PlanError(
                f"{source}: its {name} is not the one that was saved (the sha256 "
                f"differs): the file was damaged or edited. {_WAY_OUT}"
            )
    plan = from_json(document.get("plan"), f"{source}: plan")
    cluster = _part(Cluster.from_json, document["cluster"], f"{source}: cluster")
    chain = _chain(document["chain"], f"{source}: chain")
    # Files of before it was written mean Adam in float32.
    training = decode(Training, document.get("training", {}), f"{source}: training")
    return SavedPlan(plan=plan, cluster=cluster, chain=chain, training=training)


def _chain(data: Any, where: str) -> Chain:
    """The chain, with every value's type checked before it is read."""
    if isinstance(data, dict):
        _version(data.get("version"), CHAIN_VERSION, where)
        decode(Chain, {k: v for k, v in data.items() if k != "version"}, where)
    return _part(Chain.from_json, data, where)


def _part(read: Any, data: Any, where: str) -> Any:
    try:
        return read(data)
    except UserError as error:
        raise PlanError(f"{where}: {error}") from None


def _digest(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")
