"""Commands whose help can be read and pasted at any width, and their options.

Options are declared once, as fields of the dataclass that holds them:

@dataclasses.dataclass(frozen=True)
class Options:
    seq: int = option_field(256, "Tokens in a sequence.", panel="Text")

@takes(Options)
def command(context: typer.Context, **options: Any) -> None: ...
"""

import dataclasses
import functools
import inspect
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from fullshard.tools.exits import Exit

_INFO, _UNTYPED = "typer", "untyped"
_SAME = object()
_METAVARS = {bool: "", int: "N", float: "X", str: "TEXT"}
# By no name: typer carries click inside from 0.25 on.
_UsageError: Any = typer.BadParameter.__base__
_MAX_WIDTH = 100  # of prose in a help


class _ReadableHelp:
    """Help without types that say nothing (`<bool>`), and with examples that are never broken inside a command.

    A paragraph of the epilog that is indented holds examples, one a line, each with a remark behind "  # ":

            fullshard train --model tiny    # in a minute, to look around
    """

    epilog: str | None
    help: str | None
    params: list[Any]

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts)
        if self.help:  # typer would keep ends of lines
            paragraphs = inspect.cleandoc(self.help).split("\n\n")
            self.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        panels = [each.rich_help_panel for each in self.params if not each.hidden]
        if option is not None and panels:
            option.rich_help_panel = panels[-1]  # and not alone in one above the others
        return option

    def get_params(self, ctx: Any) -> Any:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            each.process_value = functools.partial(_processed, each)
            if isinstance(each, TyperArgument):  # whose metavar is its name
                each.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # noqa: ARG005
            elif each.is_flag:
                each.metavar = ""
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse as usual; where a value is missing, the error says what the option or argument is for."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc]
        except _UsageError as error:
            lacking: Any = getattr(error, "param", None)
            named = getattr(error, "option_name", None)  # of an option without its value
            for each in self.params:
                if each is lacking and not error.message:
                    error.message = each.help or ""
                elif named in each.opts:
                    error.message += f" {each.help}"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        epilog, self.epilog = self.epilog, None
        super().format_help(ctx, formatter)  # type: ignore[misc]
        self.epilog = epilog
        width = shutil.get_terminal_size().columns - 2
        for line in _readable(epilog, width) if epilog else ():
            print(f" {line}".rstrip())


class Command(_ReadableHelp, TyperCommand):
    """A command of `App`."""


class _Commands(_ReadableHelp, TyperGroup):
    """What `App` is to typer."""


class App(typer.Typer):
    """A group of commands whose help can be read."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(
            cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, **facts
        )

    def command(self, name: str | None = None, **facts: Any) -> Any:
        return super().command(name, **{"cls": Command, **facts})


def _readable(epilog: str, width: int) -> Iterator[str]:
    """Fold paragraphs to a width; of examples, those that are too long become several lines that can be pasted."""
    for paragraph in inspect.cleandoc(epilog).split("\n\n"):
        yield ""
        if not paragraph.startswith("    "):
            yield from _wrapped(paragraph, min(width, _MAX_WIDTH))
        else:
            for line in paragraph.splitlines():
                yield from [line] if len(line) <= width else _folded(line, width)


def _folded(example: str, width: int) -> Iterator[str]:
    """Fold an example between its options, the remark above it.

        torchrun --nproc-per-node 2 train.py    # on this host

    becomes, as narrow as that,

        # on this host
        torchrun \\
            --nproc-per-node 2 train.py
    """
    command, _, remark = (part.strip() for part in example.partition("  # "))
    if remark and len(line := f"    {command}  # {remark}") <= width:
        yield line
        return
    if remark:
        yield f"    # {remark}"
    lines = [f"    {line}" for line in _wrapped(command, width - 6, "    ")]
    yield from (f"{line} \\" for line in lines[:-1])
    yield lines[-1]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap at spaces, but between an option and its value, or within `backticks`."""
    whole = re.compile(r"`[^`\n]*`|--?[\w-]+ (?![-#(])[^\s`]+|-- \S+")
    text = whole.sub(lambda found: found[0].replace(" ", "\0"), " ".join(text.split()))
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in lines]


def _processed(parameter: Any, ctx: Any, typed: Any) -> Any:
    """Convert what was typed for a parameter; where that cannot be, the error repeats it."""
    try:
        return type(parameter).process_value(parameter, ctx, typed)
    except typer.BadParameter as error:
        if isinstance(typed, str) and typed not in error.message:
            expected = re.sub(r"^Input should be ([^,]*).*", r"must be \1", error.message)
            error.message = f"{typed}: {expected}."
        raise


def refuse(command: str, problem: object) -> typer.Exit:
    """Say on standard error why options cannot work, and return what to raise."""
    for line in str(problem).splitlines():
        print(f"fullshard {command}: {line}", file=sys.stderr)
    print(f"Options: fullshard {command} --help", file=sys.stderr)
    return typer.Exit(Exit.USAGE)


def argument(help_text: str, metavar: str) -> Any:
    """Declare an argument of a command, in `Annotated`."""
    return typer.Argument(help=help_text, metavar=metavar)


def option(
    help_text: str,
    metavar: str | None = None,
    *names: str,
    panel: str | None = None,
    least: float | None = None,
    **facts: Any,
) -> Any:
    """Declare an option of a command, in `Annotated`.

    names: instead of the parameter's own. least: the smallest value; help does not repeat it, as typer's `min` does.
    """

    def check(value: float | None) -> float | None:
        if value is not None and least is not None and not value >= least:
            raise typer.BadParameter(f"{value}: must be at least {least}.")
        return value

    if least is not None:
        facts["callback"] = check
    return typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=panel, **facts)


def flag(name: str, help_text: str, *, panel: str | None = None) -> Any:
    """Declare an option that takes no value: it has no --no- form."""
    return option(help_text, None, name, panel=panel)


def option_field(
    default: Any,
    help_text: str,
    *names: str,
    panel: str,
    metavar: str | None = None,
    values: Sequence[str] = (),
    untyped: Any = _SAME,
    **facts: Any,
) -> Any:
    """Declare a field of a dataclass that is an option as well.

    names: instead of the field's own. values: what a shell offers to complete it with, and a help without a metavar
    shows. untyped: what the command
    line has in place of the default, such as None for what depends on other options. facts: more of the field's
    metadata.
    """

    def begun(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    complete: dict[str, Any] = {"autocompletion": begun} if values else {}
    info = option(help_text, metavar or "|".join(values) or None, *names, panel=panel, **complete)
    untyped = default if untyped is _SAME else untyped
    return dataclasses.field(default=default, metadata={_INFO: info, _UNTYPED: untyped, **facts})


def panel(name: str) -> Any:
    """Return `option_field` for a panel of the help."""
    return functools.partial(option_field, panel=name)


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
        if info.metavar is None:
            kinds = (*typing.get_args(kind), kind)
            info.metavar = next((_METAVARS[each] for each in kinds if each in _METAVARS), "TEXT")
        # As `flag`: typer keeps the first of the names given where a default would be.
        if kind is bool and info.default is ...:
            info.param_decls = (f"--{field.name.replace('_', '-')}",)
        parameter = inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, info],
        )
        found.append(parameter)
    return found
