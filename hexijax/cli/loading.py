"""From what the user typed to an Experiment: find the file, run it, call its function.

The project's root (nearest parent with a pyproject.toml, else the parent of the file's
folder) goes on the path, so that `from models import ...` works from any directory. A
fault in the user's file is told by the user's line, not by ours.
"""

import dataclasses
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from hexijax.cli.fields import FUNCTION, Source
from hexijax.cli.settings import Value
from hexijax.errors import UserError, did_you_mean
from hexijax.experiment import Experiment
from hexijax.weights.opening import beside as weights_beside
from hexijax.weights.opening import is_weights


def find_experiment(name: str) -> Path:
    """The file that a path or a module name (``experiments.quickstart``) stands for.

    Raises:
      UserError: there is none.
    """
    path = Path(name).expanduser()
    candidates = [path]
    if path.suffix != ".py":
        candidates.append(Path(*name.split(".")).with_suffix(".py"))
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    folder = candidates[-1].parent
    folder = folder if folder.is_dir() else Path("experiments")
    near = [str(file) for file in sorted(folder.glob("*.py")) if _defines_one(file)]
    looked = " and ".join(map(str, candidates))
    raise UserError(
        f"There is no experiment {name!r} (looked for {looked} from "
        f"{Path.cwd()}).{did_you_mean(str(candidates[-1]), near)}"
        + (f" Experiments there: {', '.join(near)}." if near else "")
    )


def _defines_one(file: Path) -> bool:
    """Whether a file seems to be an experiment's, by its text."""
    return f"\ndef {FUNCTION}(" in file.read_text(encoding="utf-8", errors="replace")


def project_root(file: Path) -> Path:
    """The folder that ``file``'s imports start from."""
    for folder in file.parents:
        if (folder / "pyproject.toml").is_file():
            return folder
    return file.parent.parent


def load_experiment(source: Source, values: Mapping[str, Value]) -> Experiment:
    """Runs the file and calls ``experiment`` with the values that are its parameters.

    Other values replace fields of the Experiment it returns.

    Raises:
      UserError: the file fails, or returns something else.
    """
    function = _import(source.path)
    own = {parameter.name for parameter in source.parameters}
    ours: dict[str, Any] = {k: v for k, v in values.items() if k not in own}
    theirs = {k: v for k, v in values.items() if k in own}
    experiment = _call(lambda: function(**theirs), source.path)
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"{FUNCTION}() of {source.path} returned a {type(experiment).__name__}; it "
            "must return a hexijax.Experiment."
        )
    if is_weights(experiment.init):
        ours["init"] = weights_beside(experiment.init, source.path.parent)
    if experiment.name == _default_name():
        ours.setdefault("name", source.path.stem)
    return dataclasses.replace(experiment, **ours)


def beside(source: Source, name: str) -> Path:
    """The file that a field names, relative to the experiment's folder."""
    return source.path.parent / Path(name).expanduser()


def _import(path: Path) -> Callable[..., object]:
    root = project_root(path)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    # A name of its own: `experiments` may also be an installed package.
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    _call(lambda: spec.loader.exec_module(module), path)
    function = getattr(module, FUNCTION)
    assert inspect.isfunction(function)
    return function


def _call(run: Callable[[], object], path: Path) -> object:
    """``run()``; its exceptions are told by the line of ``path`` they came through."""
    try:
        return run()
    except UserError:
        raise
    except Exception as error:
        raise UserError(_tell(error, error.__traceback__, path)) from error


def _tell(error: Exception, trace: TracebackType | None, path: Path) -> str:
    frames = traceback.extract_tb(trace)
    theirs = [frame for frame in frames if frame.filename == str(path)]
    says = "".join(traceback.format_exception_only(error)).rstrip()
    if not theirs:
        return f"{path} failed.\n{says}"
    last = frames[-1]
    below = f"\nRaised in {last.filename}, line {last.lineno}." * (last != theirs[-1])
    return (
        f"{path}, line {theirs[-1].lineno}, in {theirs[-1].name}:\n"
        f"    {theirs[-1].line}\n{says}{below}"
    )


def _default_name() -> str:
    (field,) = (f for f in dataclasses.fields(Experiment) if f.name == "name")
    return str(field.default)
