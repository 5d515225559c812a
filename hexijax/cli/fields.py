"""What can be set from the command line: names, types and sentences, read from source.

    experiment.py of the user --ast--> parameters of experiment() --+
    hexijax/experiment.py     --ast--> fields of Experiment        --+-> Field by name

Nothing is imported, so `--help` answers at once and a typo is caught before JAX starts.
"""

import ast
import dataclasses
import itertools
import re
from pathlib import Path

import hexijax.experiment
from hexijax.errors import UserError

FUNCTION = "experiment"
"""Name of the function that an experiment's file defines."""

_SCALARS = ("int", "float", "str", "bool", "None")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One thing with a name that a person may change."""

    name: str
    """As written left of the ``=``."""

    type: str
    """Its annotation, as written; empty: none."""

    default: str
    """Its default, as written."""

    doc: str
    """A sentence."""

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The parts of its type if text can stand for each of them, else None."""
        if not self.type:
            return None
        node = ast.parse(self.type, mode="eval").body
        parts = tuple(_union(node))
        known = all(part in _SCALARS or _is_literal(part) for part in parts)
        return parts if known else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An experiment's file as text says it."""

    path: Path
    """Where it lies."""

    note: str
    """Its docstring."""

    parameters: tuple[Field, ...]
    """Of its ``experiment`` function."""

    cluster: str
    """The cluster file it names, if it does so in plain text, else empty."""

    @property
    def fields(self) -> dict[str, Field]:
        """All that can be set: its own parameters, then fields of the Experiment."""
        own = {field.name: field for field in self.parameters}
        rest = {f.name: f for f in experiment_fields() if f.choices is not None}
        return own | {name: f for name, f in rest.items() if name not in own}


def read_source(path: Path) -> Source:
    """Reads an experiment's file without running it.

    Raises:
      UserError: it is no Python, or has no ``experiment`` function.
    """
    try:
        module = ast.parse(path.read_text(), filename=str(path))
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        raise UserError(
            f"{path}, line {error.lineno}: {error.msg}.\n    {line}"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no Python text: {error}.") from error
    functions = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name == FUNCTION
    ]
    if not functions:
        raise UserError(
            f"{path} defines no function {FUNCTION}(); an experiment's file has one, "
            "which returns a hexijax.Experiment. See experiments/quickstart.py."
        )
    return Source(
        path=path,
        note=ast.get_docstring(module) or "",
        parameters=tuple(_parameters(functions[-1])),
        cluster=_cluster_text(module, functions[-1]),
    )


def experiment_fields() -> list[Field]:
    """The fields of ``Experiment``, each with the sentence under it."""
    file = hexijax.experiment.__file__
    assert file is not None
    module = ast.parse(Path(file).read_text())
    (body,) = (
        node.body
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name == "Experiment"
    )
    fields = []
    for node, below in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(node.target, ast.Name)
            fields.append(
                Field(
                    name=node.target.id,
                    type=ast.unparse(node.annotation),
                    default="" if node.value is None else ast.unparse(node.value),
                    doc=" ".join(ast.literal_eval(below.value).split()),
                )
            )
    return fields


def _parameters(function: ast.FunctionDef) -> list[Field]:
    arguments, docs = function.args, _argument_docs(ast.get_docstring(function) or "")
    positional = [*arguments.posonlyargs, *arguments.args]
    without = [None] * (len(positional) - len(arguments.defaults))
    pairs = [
        *zip(positional, [*without, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    fields = []
    for argument, default in pairs:
        if default is None:
            raise UserError(
                f"The parameter {argument.arg} of {FUNCTION}() (line "
                f"{argument.lineno}) has no default; all of them need one, so that the "
                "experiment runs as it is."
            )
        written = argument.annotation
        fields.append(
            Field(
                name=argument.arg,
                type=_type_of(default) if written is None else ast.unparse(written),
                default=ast.unparse(default),
                doc=docs.get(argument.arg, ""),
            )
        )
    return fields


def _argument_docs(docstring: str) -> dict[str, str]:
    """The sentences under ``Args:``, by name."""
    _, _, section = docstring.partition("Args:\n")
    section = re.split(r"\n\S", section, maxsplit=1)[0]
    entries = re.findall(
        r"^ +(\w+): (.*(?:\n(?! +\w+: ).+)*)", section, flags=re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in entries}


def _type_of(default: ast.expr) -> str:
    """The type a parameter without annotation has by its default."""
    if isinstance(default, ast.Constant) and default.value is not None:
        return type(default.value).__name__
    return ""


def _cluster_text(module: ast.Module, function: ast.FunctionDef) -> str:
    """A constant given as ``cluster``: a parameter's default, or in any call."""
    named = [f.default for f in _parameters(function) if f.name == "cluster"]
    constants = [ast.parse(text, mode="eval").body for text in named]
    for node in ast.walk(module):
        if isinstance(node, ast.keyword) and node.arg == "cluster":
            constants.append(node.value)
    for node in constants:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
    return ""


def _union(node: ast.expr) -> list[str]:
    """The parts of ``A | B | Literal["c", "d"]``: names, and literals in quotes."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return [*_union(left), *_union(right)]
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return [ast.unparse(value) for value in values]
        case _:
            return [ast.unparse(node)]


def _is_literal(part: str) -> bool:
    return part[:1] in "'\"" or part.lstrip("-").isdigit()
