"""What a person trains: the loss, the data, the optimizer, and the rules of a step."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from hexijax.errors import UserError
from hexijax.weights.source import Source

Params = Any
"""A tree of arrays, as the user's model names them."""

Batch = Mapping[str, np.ndarray]
"""Arrays by name; dim 0 of each is the sample."""


@runtime_checkable
class Data(Protocol):
    """Where global batches come from; iteration can be saved and continued."""

    def batches(self, batch_size: int) -> "BatchIterator":
        """An endless iterator of global batches of exactly ``batch_size`` samples."""
        ...

    def fingerprint(self) -> str:
        """Short text that changes when the data does."""
        ...


@runtime_checkable
class BatchIterator(Protocol):
    """An iterator whose position can be stored."""

    def __iter__(self) -> Iterator[Batch]: ...
    def __next__(self) -> Batch: ...
    def get_state(self) -> Any:
        """JSON-able position: what ``set_state`` of a fresh iterator continues from."""
        ...

    def set_state(self, state: Any) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything a run depends on besides the cluster and the plan."""

    loss: Any
    """``loss(params, batch, keys) -> (sum, weight)`` or with a dict of metrics; one of
    ``hexijax.layers.loss.ModelLoss`` can also change dtype and attention by stage."""

    init: Callable[..., Params] | Params | str | Path | Source | None = None
    """``init(key) -> params``, a tree of arrays, or weights: the path, relative to the
    experiment's folder, of a safetensors file, a folder of them, an Orbax folder or a
    run, or one of ``hexijax.weights``; None: the loss's own ``init``."""

    optimizer: Any = None
    """An optax gradient transformation without clipping (see ``clip_norm``)."""

    trainable: Any = None
    """Which parameters train; the others have no gradient, no state and no traffic. A
    function of a path (``blocks/3/ff/up/kernel``), a pattern for paths or a sequence of
    them (``*`` stands for any part), a kind of nnx variable (``nnx.LoRAParam``), or a
    tree of bools; None: all that the optimizer does not leave as they are."""

    data: Any = None
    """A ``Data``."""

    batch_size: int = 32
    """Sequences (samples) of one optimizer step, exact under every plan."""

    steps: int = 100
    """Optimizer steps."""

    seed: int = 0
    """Parameters and all random keys follow from it."""

    cluster: str = ""
    """Cluster file, relative to the experiment's folder; empty: this machine."""

    plan: str = ""
    """Plan file, relative likewise; empty: the planner makes one."""

    dtype: str = "float32"
    """Compute dtype asked for; a kind that lacks it computes in the next it has."""

    clip_norm: float | None = None
    """Largest global gradient norm; None: no clipping."""

    loss_scale: float | Literal["dynamic"] | None = None
    """Factor on the loss during the backward, divided out before the update; dynamic:
    searched for, and steps that overflow are left out; None: dynamic where a stage of
    the plan computes in float16, else 1."""

    skip_nonfinite: bool = False
    """Leave parameters and moments alone in a step whose gradient is not finite; a
    dynamic loss_scale does so anyway."""

    per_microbatch: bool = False
    """Allow a loss that is no sum over samples; it is then one per microbatch."""

    eval_every: int = 0
    """Steps between evaluations; 0: none."""

    eval_data: Any = None
    """A ``Data`` to evaluate on; its batches may end, the last one short."""

    eval_batches: int = 8
    """Batches of an evaluation: the same first ones each time, or all there are."""

    eval_ends: bool = False
    """Evaluate also before the first step and after the last."""

    tokens_per_sample: int = 1
    """Tokens in a sample, for tokens/s."""

    name: str = "experiment"
    """Name for the run folder."""

    max_microbatch_size: int | None = None
    """Cap on the samples of one lane's microbatch; None: the planner's choice."""

    offload: bool = True
    """Plans may rest state, parameters and residuals in host memory, where that makes
    the model fit or a step shorter; false: all on the devices."""

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "steps": 1, "eval_every": 0, "eval_batches": 1}
        for field, minimum in least.items():
            value = getattr(self, field)
            if value < minimum:
                raise UserError(
                    f"Experiment.{field} is {value}; it must be at least {minimum}."
                )
        for field in ("clip_norm", "loss_scale", "max_microbatch_size"):
            value = getattr(self, field)
            words = ("dynamic",) if field == "loss_scale" else ()
            if value is None or value in words:
                continue
            if isinstance(value, str) or not 0 < value < math.inf:
                others = "".join(f", or {word!r}" for word in words)
                raise UserError(
                    f"Experiment.{field} is {value!r}; it must be positive and "
                    f"finite{others}."
                )
        for field in ("eval_every", "eval_ends"):
            value = getattr(self, field)
            if value and self.eval_data is None:
                raise UserError(
                    f"Experiment.{field} is {value}, but there is no eval_data to "
                    f"evaluate on. Give it a Data, or set {field}={type(value)(0)}."
                )
