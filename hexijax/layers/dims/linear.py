"""Sums over the followed dim: what is linear keeps them."""

from collections.abc import Sequence
from typing import Any

from hexijax.layers import jaxprs
from hexijax.layers.dims.states import Along, Mixed, Same, State, Summed

_LINEAR = jaxprs.words(
    """broadcast_in_dim convert_element_type copy expand_dims neg
    reduce_precision reduce_sum reshape rev slice squeeze transpose real imag
    copy_p cumsum sharding_constraint optimization_barrier name stop_gradient
   """
)


def summed(eqn: Any, ins: Sequence[State]) -> State:
    name = eqn.primitive.name
    sums = [isinstance(s, Summed) for s in ins]
    if any(isinstance(s, Along) for s in ins):
        return Mixed(eqn, "combines each sample with a sum over samples")
    if name in _LINEAR:
        return Summed()
    if name in {"add", "sub", "add_any", "concatenate", "pad"}:
        zeros = (s.is_zero for s in ins if isinstance(s, Same))
        if all(sums) or all(zeros):
            return Summed()
        return Mixed(eqn, "adds a term that no sample owns, once a microbatch")
    one_sum = sum(sums) == 1
    if name in {"mul", "dot_general"} and one_sum:
        return Summed()
    if name == "div" and sums == [True, False]:
        return Summed()
    if name == "select_n" and not sums[0]:
        zeros = (s.is_zero for s in ins[1:] if isinstance(s, Same))
        if all(zeros):
            return Summed()
    return Mixed(eqn, "is not linear in a sum over samples")
