"""What a plan must know of the training it is for, beyond the model."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Facts of an Experiment that costs and memory depend on."""

    dtype: str = "float32"
    """Compute dtype asked for; a kind that lacks it computes in the next it has."""

    moments: int = 2
    """fp32 arrays of the optimizer for each parameter: 2 for Adam, 1 for momentum."""

    whole_leaves: bool = False
    """No leaf's state is cut, for optimizers that look inside a leaf."""

    clip: bool = False
    """The update waits for the global gradient norm."""

    skip_nonfinite: bool = False
    """The update waits to hear that all gradients are finite."""

    dynamic_scale: bool | None = None
    """So does a dynamic loss scale; None: there is one where a stage of the plan
    computes in float16."""

    per_microbatch: bool = False
    """The loss is one a microbatch: no plan pads, or cuts one in unlike ways."""

    max_microbatch_size: int | None = None
    """Cap on the samples of one lane's microbatch; None: the planner's choice."""

    offload: bool = True
    """Plans may use host memory."""


PLAIN = Training()
"""Adam in float32, and no rule that an update waits for."""
