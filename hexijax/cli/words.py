"""Commands and flags that do not exist are answered with the nearest that do.

argparse would list all choices; the rest of the command line is left to it.
"""

import argparse
from collections.abc import Sequence

from hexijax.errors import UserError, did_you_mean


def check_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuses an unknown command, or an unknown flag of a known one.

    Raises:
      UserError: with what was meant, if anything is near.
    """
    commands = _commands(parser)
    if not words or words[0].startswith("-"):
        return
    command = words[0]
    if command not in commands:
        raise UserError(
            f"There is no command {command!r}.{did_you_mean(command, commands)} "
            f"Commands are {', '.join(commands)}."
        )
    flags = [*commands[command]._option_string_actions]  # argparse has no other way
    for word in words[1:]:
        name = word.partition("=")[0]
        if not word.startswith("--") or len(word) == 2:
            continue
        if not any(flag.startswith(name) for flag in flags):  # a start is enough
            raise UserError(
                f"hexijax {command} has no flag {name}.{did_you_mean(name, flags)} "
                f"`hexijax {command} --help` lists them."
            )


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (
        a for a in parser._actions if isinstance(a, argparse._SubParsersAction)
    )
    return dict(action.choices)
