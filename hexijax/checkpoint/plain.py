"""Save and resume through Orbax, under one plan.

    folder/
      300/state/   every array of ``engine.arrays()``, by its key, as its shards lie
      300/meta/    JSON: step, data position, facts, shapes, where each parameter is

Orbax writes a step under another name and renames it last: a half-written step does not
exist. Saving waits until all bytes are written.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hexijax.errors import UserError
from hexijax.weights.runs import Stored, index_json

if TYPE_CHECKING:
    import jax

FORMAT_VERSION = 1

CHUNK_BYTES = 4 * 2**20
"""Of a stored array: whoever reads a few rows decodes no more than this."""


@runtime_checkable
class Stateful(Protocol):
    """What an engine gives and takes."""

    def arrays(self) -> "dict[str, jax.Array]":
        """Every array of parameters and optimizer state, by a stable key."""
        ...

    def array_targets(self) -> "dict[str, jax.ShapeDtypeStruct]":
        """Shape, dtype and sharding of each of them."""
        ...

    def stored_params(self) -> list[Stored]:
        """Which of them holds which box of which parameter."""
        ...

    def load_arrays(self, arrays: "dict[str, jax.Array]") -> None:
        """Takes them back."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Where a run stood, besides its arrays."""

    step: int
    """Optimizer steps done."""

    data_state: Any
    """Position of the data iterator."""

    facts: Mapping[str, Any]
    """What the run depended on when it was saved."""


def save(
    folder: Path,
    engine: Stateful,
    *,
    step: int,
    data_state: Any,
    facts: Mapping[str, Any],
    keep: int = 2,
) -> None:
    """Writes the state after ``step`` steps.

    Args:
        folder: of all steps; made if it is missing.
        engine: whose arrays are written.
        step: optimizer steps done.
        data_state: position of the data iterator, JSON-able.
        facts: what must be equal on resume, by a name for people; JSON-able.
        keep: newest steps kept; older ones are removed when this one is whole.
    """
    import orbax.checkpoint as ocp

    arrays = engine.arrays()
    meta = {
        "version": FORMAT_VERSION,
        "step": step,
        "data_state": data_state,
        "facts": dict(facts),
        "arrays": {key: _describe(array) for key, array in arrays.items()},
        "params": index_json(engine.stored_params()),
    }
    # Orbax refuses arrays without elements; their shape says all about them.
    stored = {key: array for key, array in arrays.items() if array.size}
    chunked = {key: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for key in stored}
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False
    )
    with ocp.CheckpointManager(folder.resolve(), options=options) as manager:
        if step in manager.all_steps():
            manager.delete(step)  # saved before, without a step since
        manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(stored, save_args=chunked),
                meta=ocp.args.JsonSave(meta),
            ),
            force=True,
        )


def latest(folder: Path) -> int | None:
    """The newest whole step in ``folder``; None: there is none."""
    if not folder.is_dir():
        return None
    steps = (int(p.name) for p in folder.iterdir() if p.name.isdigit())
    return max(steps, default=None)


def restore(
    folder: Path,
    engine: Stateful,
    *,
    facts: Mapping[str, Any],
    step: int | None = None,
) -> Saved:
    """Loads a step (None: the newest) into ``engine``, which has been initialised.

    Raises:
      UserError: there is no such step, or it belongs to another plan, model or data.
    """
    import jax
    import orbax.checkpoint as ocp

    place, targets = _find(folder, step), engine.array_targets()
    meta = _read_meta(place)
    _check_facts(meta["facts"], facts, place)
    _check_arrays(meta["arrays"], targets, place)
    stored = {key: target for key, target in targets.items() if target.size}
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(place / "state", stored)
    for key in targets.keys() - stored.keys():
        zeros = jax.numpy.zeros(targets[key].shape, targets[key].dtype)
        arrays[key] = jax.device_put(zeros, targets[key].sharding)
    engine.load_arrays(arrays)
    return _saved(meta)


def look(
    folder: Path, step: int | None = None, *, facts: Mapping[str, Any] | None = None
) -> Saved:
    """Where a step (None: the newest) stood; no array is read.

    Raises:
      UserError: there is no such step, or it has other facts.
    """
    place = _find(folder, step)
    saved = _saved(_read_meta(place))
    _check_facts(saved.facts, facts or {}, place)
    return saved


def _find(folder: Path, step: int | None) -> Path:
    step = latest(folder) if step is None else step
    if step is None or not (folder / str(step)).is_dir():
        what = "no checkpoint" if step is None else f"no step {step}"
        raise UserError(
            f"There is {what} in {folder}. A run writes one at its end, unless it was "
            "told --no-save, and every N steps with --save-every N."
        )
    return folder.resolve() / str(step)


def _saved(meta: Mapping[str, Any]) -> Saved:
    return Saved(step=meta["step"], data_state=meta["data_state"], facts=meta["facts"])


def _read_meta(place: Path) -> dict[str, Any]:
    file = place / "meta" / "metadata"
    try:
        meta = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{place} is no checkpoint of a hexijax run: {file} cannot be read "
            f"({error})."
        ) from error
    if meta.get("version") != FORMAT_VERSION:
        raise UserError(
            f"The checkpoint {place} has format version {meta.get('version')!r}; this "
            f"hexijax reads version {FORMAT_VERSION}."
        )
    return meta


def _check_facts(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], place: Path
) -> None:
    for name, value in wanted.items():
        if name in saved and saved[name] != value:
            raise UserError(
                f"The checkpoint {place} cannot be resumed: its {name} is "
                f"{saved[name]}, this run's is {value}. Resume with what it was "
                "written under, or start a new run."
            )


def _check_arrays(
    saved: Mapping[str, str], targets: "Mapping[str, jax.ShapeDtypeStruct]", place: Path
) -> None:
    """Raises a ``UserError`` that names the first key at which the two differ."""
    here = {key: _describe(target) for key, target in targets.items()}
    for key in sorted(saved.keys() | here.keys()):
        if saved.get(key) != here.get(key):
            raise UserError(
                f"The checkpoint {place} belongs to another plan or model. The first "
                f"difference is at {key!r}: it has {saved.get(key, 'none')}, this run "
                f"has {here.get(key, 'none')}. Resume under the plan that wrote it "
                "(plan.txt in the run's folder), or start a new run."
            )


def _describe(array: "jax.Array | jax.ShapeDtypeStruct") -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
