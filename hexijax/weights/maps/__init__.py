"""Hugging Face's names for the models of models/, a file a family."""

import re
from collections.abc import Iterable, Mapping

from hexijax.errors import did_you_mean
from hexijax.weights.errors import WeightsError
from hexijax.weights.maps.bert import BERT
from hexijax.weights.maps.gpt2 import GPT2
from hexijax.weights.maps.llama import LLAMA
from hexijax.weights.maps.vit import VIT
from hexijax.weights.names import Function, Named, NameMap, Table

FAMILIES: Mapping[str, NameMap] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "bert": BERT,
    "vit": VIT,
}

Names = str | NameMap | Table | Function | None
"""How a file names parameters: a family, an own map, or (None) by their paths."""


def name_map(names: Names) -> NameMap | None:
    """The map behind ``names``.

    Raises:
      WeightsError: no family has that name.
    """
    if names is None or isinstance(names, NameMap):
        return names
    if not isinstance(names, str):
        return NameMap(table=names)
    if names not in FAMILIES:
        raise WeightsError(
            f"There is no name map {names!r}.{did_you_mean(names, FAMILIES)} Known are "
            f"{', '.join(FAMILIES)}; an own one is a dict or a function from a "
            "parameter's path to the file's name."
        )
    return FAMILIES[names]


def families_of(names: Iterable[str]) -> list[str]:
    """Families whose tables have most of these names."""
    given = [re.sub(r"\.\d+\.", ".*.", name) for name in names]
    if not given:
        return []

    def share(family: NameMap) -> float:
        assert isinstance(family.table, Mapping)
        known = {x.name if isinstance(x, Named) else x for x in family.table.values()}
        known |= {name.removeprefix(family.prefix) for name in known}
        return sum(name in known for name in given) / len(given)

    return [name for name, family in FAMILIES.items() if share(family) > 0.5]
