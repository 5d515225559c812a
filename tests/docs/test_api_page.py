"""docs/api.md lists every public name with the arguments that it has."""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hexijax

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
NAMES = sorted(set(hexijax.__all__) - {"__version__"})


def arguments(function: Callable[..., Any]) -> str:
    """As the page has them: without types, and defaults that are objects as dots."""
    empty = inspect.Parameter.empty

    class Dots:
        def __repr__(self) -> str:
            return "..."

    def shown(value: Any) -> Any:
        try:
            ast.literal_eval(repr(value))
        except (ValueError, SyntaxError):
            return value if value is empty else Dots()
        return value

    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=empty, default=shown(p.default))
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    plain = signature.replace(parameters=parameters, return_annotation=empty)
    return str(plain)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_its_section(name: str):
    heading = f"## `{name}{arguments(getattr(hexijax, name))}`\n"
    assert heading in PAGE
    assert getattr(hexijax, name).__doc__


def test_there_is_no_other_section():
    assert sorted(re.findall(r"^## `(\w+)\(", PAGE, re.MULTILINE)) == NAMES


def test_a_trainers_methods_and_properties_are_in_its_table():
    rows = "".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))
    public = {k: v for k, v in vars(hexijax.Trainer).items() if not k.startswith("_")}
    for name, member in public.items():
        is_method = inspect.isfunction(member)
        assert f"`{name}{arguments(member) if is_method else ''}`" in rows
        assert member.__doc__
    assert len(re.findall(r"`\w+[(`]", rows)) == len(public)
