"""How options of commands are declared: short forms of `typer.Option`."""

from typing import Any

import typer


def option(help_text: str, *, panel: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel)


def flag(name: str, help_text: str, *, panel: str) -> Any:
    return typer.Option(name, help=help_text, rich_help_panel=panel)


def import_path(help_text: str) -> Any:
    return typer.Option(help=help_text, metavar="MODULE:FUNCTION", rich_help_panel="Program")
