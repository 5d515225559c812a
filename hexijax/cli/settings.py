"""`--set field=value`: text into the type a field asks for.

["steps=300", "data=notes.txt"] + Fields -> {"steps": 300, "data": "notes.txt"}
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from hexijax.cli.fields import Field, Source, experiment_fields
from hexijax.errors import UserError, did_you_mean

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")

Value = Any
"""int, float, str, bool or None: what its field's annotation says."""


def parse_settings(assignments: Sequence[str], source: Source) -> dict[str, Value]:
    """The values asked for; a later assignment to the same field wins.

    Raises:
      UserError: no such field, or a value that is not of its type.
    """
    fields = source.fields
    values: dict[str, Value] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals:
            raise UserError(
                f"--set {assignment}: an assignment is needed, such as --set steps=300."
            )
        if name not in fields:
            raise UserError(_unknown(name, text, fields, source))
        values[name] = parse_value(text.strip(), fields[name])
    return values


def parse_value(text: str, field: Field) -> Value:
    """The value that ``text`` stands for.

    Raises:
      UserError: it is of none of the field's types.
    """
    parts = field.choices
    if parts is None:
        raise UserError(
            f"--set {field.name}={text}: {field.name} has type "
            f"{field.type or 'unknown'!r}, which text cannot give. Annotate it with "
            "int, float, str, bool or a Literal, or change it in the experiment's file."
        )
    for part in sorted(parts, key=lambda part: part == "str"):  # any text is a str
        match part:
            case "None" if text.lower() in ("none", ""):
                return None
            case "bool" if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            case "int" | "float":
                number = _number(text, part)
                if number is not None:
                    return number
            case "str":
                return text
            case _ if part[:1] in "'\"" or part.lstrip("-").isdigit():
                if text == str(ast.literal_eval(part)):
                    return ast.literal_eval(part)
            case _:
                pass
    literals = [part.strip("'\"") for part in parts]
    hint = did_you_mean(text, literals) if text not in literals else ""
    raise UserError(
        f"--set {field.name}={text}: {field.name} takes "
        f"{' or '.join(map(_describe, parts))}, not {text!r}.{hint} Its default is "
        f"{field.default}."
    )


def _number(text: str, kind: str) -> int | float | None:
    digits = text.replace("_", "")
    try:
        return int(digits) if kind == "int" else float(digits)
    except ValueError:
        pass
    try:  # 1e6 is a fine number of tokens
        number = float(digits)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def _describe(part: str) -> str:
    words = {
        "int": "a whole number",
        "float": "a number",
        "str": "text",
        "bool": "true or false",
        "None": "none",
    }
    return words.get(part, part)


def _unknown(name: str, text: str, fields: Mapping[str, Field], source: Source) -> str:
    fixed = {field.name for field in experiment_fields()} - fields.keys()
    if name in fixed:
        return (
            f"--set {name}={text}: {name} is a Python object, which text cannot give; "
            f"change it in {source.path}."
        )
    return (
        f"--set {name}={text}: {source.path} has no field {name!r}."
        f"{did_you_mean(name, fields)} Its fields are {', '.join(fields)}."
    )
