"""Measurements of Sailor (github.com/eth-easl/sailor, MIT): profiles, links, plans.

    layer_times, models, links       -> profile(gpu), model_chain(model), link tables
    measured_plans, published_plans  -> Case: a Plan with its Cluster and Chain

The system measured was Megatron-DeepSpeed in float32 with TF32 products, 1F1B, no
recomputation, gradients summed at the end of the step.
"""

from hexijax.published.sailor.cases import Case, measured_cases, published_cases
from hexijax.published.sailor.chain import model_chain
from hexijax.published.sailor.links import between_nodes, in_node
from hexijax.published.sailor.profile import profile

__all__ = [
    "Case",
    "between_nodes",
    "in_node",
    "measured_cases",
    "model_chain",
    "profile",
    "published_cases",
]
