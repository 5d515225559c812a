"""What a person may ask of the planner, beyond the model and the cluster."""

import dataclasses
import enum
from collections.abc import Mapping

from hexijax.costs.sums import MOMENTS
from hexijax.costs.temp import Temps
from hexijax.layers.chain import Remat
from hexijax.plan.plan import Plan, Reductions, Schedule
from hexijax.plan.precision import DYNAMIC, loss_scale
from hexijax.plan.training import Training
from hexijax.planner.objective import Objective
from hexijax.program.lower import StepRules


class Grouping(enum.StrEnum):
    """Which devices make one replica."""

    AUTO = "auto"
    """Whatever is fastest."""
    ONE = "one"
    """All devices in one pipeline."""
    NODE = "node"
    """A replica for each node."""
    KIND = "kind"
    """A replica for each kind in each node."""
    MESH = "mesh"
    """Every mesh holds the whole model: data parallelism, as uneven as the devices."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What the search may do."""

    objective: Objective = Objective.STEP
    """What it makes as small as it can."""

    usd_per_hour: Mapping[str, float] = dataclasses.field(
        default_factory=dict, hash=False
    )
    """Of one device, by kind, over what profiles say; for money's sake only."""

    schedule: Schedule | None = None
    """Order of the microbatches; None: 1F1B, and where it is faster, or the only one
    that fits, another but GPipe."""

    rounds: int = 2
    """Stages a device set holds under ``interleaved``."""

    reductions: Reductions = Reductions.EXACT
    """How gradients are summed."""

    grouping: Grouping = Grouping.AUTO
    """Which devices make one replica."""

    tensor_degrees: tuple[int, ...] = (1, 2, 4, 8)
    """Tensor degrees to consider; a mesh lies in one node."""

    max_microbatch_size: int | None = None
    """Most samples of one lane's microbatch; None: as many as fit and pay."""

    remat: tuple[Remat, ...] = (Remat.NONE, Remat.DOTS, Remat.FULL)
    """Policies to choose from, from the fastest to the smallest."""

    layers_per_stage: tuple[tuple[int, ...], ...] | None = None
    """A split of your own: layers of each stage, for each replica or one for all."""

    layers_per_segment: int | None = None
    """Most layers compiled as one; None: all of a stage, four or fewer, as is faster
    and fits."""

    use_all_devices: bool = False
    """Leave no device out, even where it costs time."""

    moments: int = MOMENTS
    """fp32 arrays of the optimizer for each parameter: 2 for Adam, 1 for momentum."""

    temps: Temps = dataclasses.field(default_factory=Temps, hash=False)
    """What segments of the model were seen to take when they were compiled."""

    even_state: bool = False
    """Devices that compute with a parameter hold equal parts of its state, as in FSDP;
    else uneven ones where even ones do not fit, or cost time."""

    layered: bool = True
    """Segments may run all microbatches one by one, with parameters gathered for each
    pass and borders in host memory, where that fits or is faster."""

    offload: bool = True
    """State, parameters and residuals may rest in the memory of their devices' hosts,
    where that fits what else would not, or makes a step shorter."""

    per_microbatch: bool = False
    """The loss is one a microbatch: none holds padding, and all stages of a replica
    have as many lanes."""

    whole_leaves: bool = False
    """No leaf's state is cut, for optimizers that look inside a leaf."""

    clip: bool = False
    """An update waits for the global gradient norm."""

    skip_nonfinite: bool = False
    """It waits to hear that all gradients are finite."""

    dynamic_scale: bool | None = None
    """So it does under a dynamic loss scale; None: there is one where a stage of the
    plan computes in float16."""

    brief: bool = False
    """What rests on hosts is placed well, not best: enough to hold a plan against."""

    seconds: float | None = None
    """Wall time the search may take; the plan then depends on the machine. None: by
    counted effort, equal input gives equal plans."""

    @classmethod
    def of(cls, training: Training) -> "PlanOptions":
        """What a training asks of every plan."""
        return cls(
            max_microbatch_size=training.max_microbatch_size,
            moments=training.moments,
            whole_leaves=training.whole_leaves,
            per_microbatch=training.per_microbatch,
            offload=training.offload,
            clip=training.clip,
            skip_nonfinite=training.skip_nonfinite,
            dynamic_scale=training.dynamic_scale,
        )

    def rules(self, plan: Plan) -> StepRules:
        """What an update waits for under a plan."""
        dynamic = self.dynamic_scale
        if dynamic is None:
            dtypes = [stage.dtype for _, stage in plan.stages()]
            dynamic = loss_scale(None, dtypes) == DYNAMIC
        return StepRules(
            clip=self.clip,
            skip_nonfinite=self.skip_nonfinite,
            dynamic_scale=dynamic,
        )
