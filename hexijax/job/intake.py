"""What a planner needs to know of an experiment: its layers, and what a step asks.

    Experiment -> trace_chain -> Chain
    Experiment -> training_facts -> Training -> plan_options -> PlanOptions

On shapes alone: nothing is computed.
"""

import dataclasses
from typing import Any

from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.experiment import Batch, Experiment
from hexijax.layers.chain import Chain
from hexijax.plan.precision import DYNAMIC
from hexijax.plan.training import Training
from hexijax.planner import PlanOptions
from hexijax.report.problem import Problem


def trace_chain(experiment: Experiment, batch: Batch | None = None) -> Chain:
    """The experiment's model as layers, on shapes alone.

    Args:
        experiment: its loss, parameters and dtype count.
        batch: what a batch looks like, of any size; None: one of its data.
    """
    from hexijax.layers import kernels
    from hexijax.runtime.intake import abstract_params
    from hexijax.runtime.trainable import frozen_names, notes

    if batch is None and experiment.data is None:
        raise UserError(
            f"The experiment {experiment.name!r} has no data. Give it a Data, such as "
            "hexijax.data.TextBytes()."
        )
    if experiment.optimizer is None:
        raise UserError(
            f"The experiment {experiment.name!r} has no optimizer. Give it an optax "
            "gradient transformation, such as optax.adamw(1e-3)."
        )
    abstract = abstract_params(experiment)
    frozen = frozen_names(experiment, abstract)
    chain = kernels.trace_chain(
        experiment.loss,
        abstract,
        next(experiment.data.batches(1)) if batch is None else batch,
        dtype=experiment.dtype,
        name=experiment.name,
        per_microbatch=experiment.per_microbatch,
        tokens_per_sample=experiment.tokens_per_sample,
        frozen=frozen,
    )
    for field in ("data", "eval_data"):
        check_vocabulary(getattr(experiment, field), chain, f"Experiment.{field}")
    more = notes(experiment, frozen)
    return dataclasses.replace(chain, notes=(*chain.notes, *more))


def check_vocabulary(data: Any, chain: Chain, what: str) -> None:
    """Raises a ``UserError`` where ``data`` may hold tokens that the model has no row
    for, as far as either is known; each batch is looked at besides."""
    tokens, inputs = getattr(data, "vocabulary", None), chain.batch.get("inputs")
    if tokens is None or inputs is None or inputs.rows is None:
        return
    if tokens > inputs.rows:
        made_by = getattr(data, "tokenizer", "")
        raise UserError(
            f"{what} has a vocabulary of {tokens:,} tokens"
            + (f" (tokenizer {made_by!r})" if made_by else "")
            + f", and the model's {inputs.picks} has {inputs.rows:,} rows. Name the "
            f"tokenizer that the model was made for, or give the model {tokens:,} rows "
            "or more."
        )


def plan_options(experiment: Experiment) -> PlanOptions:
    """What the search must respect."""
    return PlanOptions.of(training_facts(experiment))


def training_facts(experiment: Experiment) -> Training:
    """What the optimizer and the rules of a step ask of a plan."""
    from hexijax.layers.names import flatten
    from hexijax.runtime.intake import abstract_params
    from hexijax.runtime.reach import Reach, Traced, classify, owner_of
    from hexijax.runtime.trainable import frozen_names

    params = abstract_params(experiment)
    frozen = frozen_names(experiment, params)
    state = flatten(Traced.of(experiment.optimizer, params).state)
    sizes = {name: leaf.size for name, leaf in flatten(params).items()}
    held = sum(x.size for k, x in state.items() if owner_of(k, sizes) not in frozen)
    trained = sum(size for name, size in sizes.items() if name not in frozen)
    reach = classify(experiment.optimizer, params, frozen=frozen)
    return Training(
        dtype=experiment.dtype,
        moments=round(held / max(1, trained)),
        whole_leaves=reach is Reach.PER_LEAF,
        clip=experiment.clip_norm is not None,
        skip_nonfinite=experiment.skip_nonfinite,
        dynamic_scale=None
        if experiment.loss_scale is None
        else experiment.loss_scale == DYNAMIC,
        per_microbatch=experiment.per_microbatch,
        max_microbatch_size=experiment.max_microbatch_size,
        offload=experiment.offload,
    )


def problem(experiment: Experiment, chain: Chain, cluster: Cluster) -> Problem:
    """What is planned, whole."""
    return Problem(
        name=experiment.name,
        chain=chain,
        cluster=cluster,
        batch_size=experiment.batch_size,
        training=training_facts(experiment),
    )
