"""What one writer wrote of a step. Its file is written last: without it, nothing was.

    step/writer/state/           an Orbax folder of the writer's slices
    step/writer/manifest.json    which they are, and where the run stood

A step is whole when the slices of its writers tile every array of the state. The file
holds a checksum of its own.
"""

import dataclasses
import json
import time
import zlib
from collections.abc import Mapping
from typing import Any

from hexijax.weights.errors import Damaged, WeightsError
from hexijax.weights.slices import Key, Slice
from hexijax.weights.source import Tensor, dtype_of
from hexijax.weights.stored.arrays import StoredArray
from hexijax.weights.tree import Path, from_json, name_of, to_json

VERSION = 2
"""Of the format; 1 was Orbax's own, of one plan."""

NAME = "manifest.json"
STATE = "state"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """A parameter of the model."""

    path: Path
    """In the model's tree."""

    tensor: Tensor
    """Shape and dtype of all of it."""

    came_as: str = ""
    """Dtype of the weights the run began with; empty: they were made."""

    @property
    def name(self) -> str:
        """The global name."""
        return name_of(self.path)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """Where a run stood, besides its arrays; the same in all manifests of a step."""

    step: int
    """Optimizer steps done."""

    data_state: Any = None
    """Position of the data iterator, JSON-able."""

    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What a resumed run must share (seed, batch size, data), and package versions."""

    plan: str = ""
    """The plan that was run, as text; empty: the plain program."""

    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the last step: what its line said."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """See above."""

    stand: Stand
    """Where the run stood."""

    writer: str
    """Whose slices these are: a node."""

    arrays: Mapping[Slice, StoredArray]
    """The writer's slices; keys count from the writer's folder."""

    tensors: Mapping[Key, Tensor]
    """All arrays of the state, other writers' among them."""

    params: tuple[Param, ...]
    """All parameters, in the order of the model's tree."""

    saved_unix_s: float = dataclasses.field(default_factory=time.time)
    """When, for people."""

    @property
    def num_bytes(self) -> int:
        """Of the writer's slices."""
        return sum(stored.tensor.num_bytes for stored in self.arrays.values())


def render(manifest: Manifest) -> bytes:
    """The file."""
    stand = manifest.stand
    body = {
        "step": stand.step,
        "data_state": stand.data_state,
        "facts": dict(stand.facts),
        "plan": stand.plan,
        "metrics": dict(stand.metrics),
        "writer": manifest.writer,
        "saved_unix_s": manifest.saved_unix_s,
        "tensors": [[*key, *_tensor(t)] for key, t in manifest.tensors.items()],
        "params": [
            {
                "path": to_json(param.path),
                "tensor": _tensor(param.tensor),
                "came_as": param.came_as,
            }
            for param in manifest.params
        ],
        "arrays": [
            {
                "slice": [each.name, each.kind, [list(rows) for rows in each.box]],
                "key": stored.key,
                "tensor": _tensor(stored.tensor),
                "chunk": list(stored.chunk),
                "crc32c": [f"{crc:08x}" for crc in stored.crc32c],
            }
            for each, stored in manifest.arrays.items()
        ],
    }
    text = json.dumps(body)
    head = json.dumps({"version": VERSION, "crc32": zlib.crc32(text.encode())})
    return f"{head}\n{text}\n".encode()


def parse(data: bytes, where: str) -> Manifest:
    """The manifest of a file.

    Raises:
      Damaged: it is not what was written.
      WeightsError: it is of another version of hexijax.
    """
    head, _, text = data.decode(errors="replace").partition("\n")
    text = text.removesuffix("\n")
    try:
        known = json.loads(head)
        version, crc = known["version"], known["crc32"]
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"{where} is no manifest of a saved step ({error!r}).") from error
    if version != VERSION:
        raise WeightsError(
            f"The checkpoint {where} has format version {version!r}; this hexijax "
            f"reads version {VERSION}."
        )
    if zlib.crc32(text.encode()) != crc:
        raise Damaged(f"{where} is not what was written: its checksum differs.")
    return _from(json.loads(text))


def _from(body: Mapping[str, Any]) -> Manifest:
    return Manifest(
        stand=Stand(
            step=body["step"],
            data_state=body["data_state"],
            facts=body["facts"],
            plan=body["plan"],
            metrics=body["metrics"],
        ),
        writer=body["writer"],
        saved_unix_s=body["saved_unix_s"],
        tensors={
            Key(name, kind): _of(tensor) for name, kind, *tensor in body["tensors"]
        },
        params=tuple(
            Param(
                path=from_json(param["path"]),
                tensor=_of(param["tensor"]),
                came_as=param["came_as"],
            )
            for param in body["params"]
        ),
        arrays={
            _slice(*entry["slice"]): StoredArray(
                key=entry["key"],
                tensor=_of(entry["tensor"]),
                chunk=tuple(entry["chunk"]),
                crc32c=tuple(int(crc, 16) for crc in entry["crc32c"]),
            )
            for entry in body["arrays"]
        },
    )


def _slice(name: str, kind: str, box: list[list[int]]) -> Slice:
    return Slice(name, kind, tuple((start, stop) for start, stop in box))


def _tensor(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), tensor.dtype.name]


def _of(data: Any) -> Tensor:
    shape, dtype = data
    return Tensor(tuple(shape), dtype_of(dtype))
