"""Options of a command, declared once: as fields of the dataclass that holds them.

@dataclasses.dataclass(frozen=True)
class Options:
    seq: int = option_field(256, "Tokens in a sequence.", panel="Text")

@takes(Options)
def command(context: typer.Context, **options: Any) -> None: ...
"""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from fullshard.tools.exits import Exit

_INFO, _UNTYPED = "typer", "untyped"
_SAME = object()


def refuse(command: str, problem: object) -> typer.Exit:
    """Say on standard error why options cannot work, and return what to raise."""
    for line in str(problem).splitlines():
        print(f"fullshard {command}: {line}", file=sys.stderr)
    print(f"Options: fullshard {command} --help", file=sys.stderr)
    return typer.Exit(Exit.USAGE)


def flag(name: str, help_text: str, *, panel: str | None = None) -> Any:
    """Declare an option that takes no value: it has no --no- form, and its help names no type."""
    return typer.Option(name, help=help_text, rich_help_panel=panel, metavar="")


def option_field(
    default: Any,
    help_text: str,
    *names: str,
    panel: str,
    metavar: str | None = None,
    untyped: Any = _SAME,
    **facts: Any,
) -> Any:
    """Declare a field of a dataclass that is an option as well.

    names: instead of the field's own. untyped: what the command line has in place of the default, such as None
    for what depends on other options. facts: more of the field's metadata.
    """
    info = typer.Option(*names, help=help_text, rich_help_panel=panel, metavar=metavar)
    untyped = default if untyped is _SAME else untyped
    return dataclasses.field(default=default, metadata={_INFO: info, _UNTYPED: untyped, **facts})


def takes(
    options: type, **before: Sequence[str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a dataclass, before its own; it receives all of them as keywords.

    before: those of its own that stand before one of the dataclass, by the name of that.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command).parameters.values()
        own = {each.name: each for each in signature if each.kind is not each.VAR_KEYWORD}
        arguments = [
            name for name in own if own[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        parameters = [own.pop(name) for name in arguments]
        for each in _parameters_of(options):
            parameters += [own.pop(name) for name in before.get(each.name, ())]
            parameters.append(each)
        keywords = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for each in (*parameters, *own.values())
        ]
        command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameters_of(options: type) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(options)
    found = []
    for field in dataclasses.fields(options):
        if _INFO not in field.metadata:
            continue
        kind, default, info = hints[field.name], field.metadata[_UNTYPED], field.metadata[_INFO]
        if typing.get_origin(kind) is tuple:
            kind, default = list[str], None
        if default is None:
            kind = kind | None
        if kind is bool:  # as `flag`
            if info.default is ...:  # where typer keeps the first of the names given
                info.param_decls = (f"--{field.name.replace('_', '-')}",)
            info.metavar = ""
        parameter = inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, info],
        )
        found.append(parameter)
    return found
