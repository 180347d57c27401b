"""The commands that run a user's model or script again: what can be typed."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.json_files import json_text
from fullshard.tools.cli_options import Command, argument, flag, option, refuse, takes
from fullshard.tools.config import OptionError, check_file
from fullshard.tools.exits import Exit
from fullshard.tools.typed_program import has_module, split_program
from fullshard.tools.verify.options import VerifyOptions

VERIFY_EXAMPLES = """
Examples, with a training script, and with functions in my_package/train.py:

    fullshard verify train.py -- --lr 1e-3 --out runs/{side}
    fullshard verify my_package.train:build  # build() returns (model, batch)
    fullshard verify my_package.train:build_model --batch my_package.train:batch --loss my_package.train:loss
    fullshard verify my_package.train:build --shard my_package.train:shard --ranks 4
    fullshard verify my_package.train:build --api fsdp1 --dtype fp64 --json

A script is run as it is, twice: sharded, and with every call that shards leaving the model whole and gradients averaged plainly. Each run ends after --steps steps of an optimizer. {side} in its arguments becomes "sharded", then "whole".

Of a model, the one process computes the loss of each rank's part in turn and divides it by the number of ranks; both sides begin with the same values and seeds, and train with SGD. Without --shard, the children of every ModuleList (and of a Sequential with several of one class) become units, and the rest one more.

Exit codes: 0 equal within the tolerance, 1 differs or failed, 2 unusable options or missing packages, 3 a rank died.
"""

COMPARE_EXAMPLES = """
Examples; what follows the script, or -m MODULE, is the script's own:

    fullshard compare train.py --lr 1e-3
    fullshard compare --ranks 4 --rounds 5 --md train.py
    fullshard compare --out runs/first/compare.json -m my_package.train

The script is run as it is: on each engine once with losses and gradients recorded, then in turn with nothing recorded, for the time and memory of a step. Each run ends after some steps of its optimizer. {side} in its arguments becomes "torch", "fullshard", "torch-1", ..., for what it writes. `fullshard report runs/first` shows the compare.json that it finds there.

Exit codes: 0 the same, or different by rounding alone, 1 a run failed, 2 unusable options, 5 different.
"""

REPLAY_EXAMPLES = """
Examples, with a function that returns the sharded model in my_package/train.py, after a step was recorded by `fullshard.debug(replay="replays/a")`:

    fullshard replay replays/a my_package.train:build  # all ranks' parts, in one process
    fullshard replay replays/a my_package.train:build --rank 3  # that of one rank, say under a debugger
    torchrun --nproc-per-node 8 -m fullshard replay replays/a my_package.train:build  # by the same ranks

Exit codes: 0 equal in every bit, 1 differs or failed, 2 unusable options or missing packages.
"""


def _offered(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from fullshard.tools.run_cli import offered

    return offered(context.params.get("words") or [], incomplete)


class RunCommand(Command):
    """Has a shell complete options as its argument does: they are those of argparse."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        (words,) = self.params
        return words.shell_complete(ctx, incomplete)


def run(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="...", autocompletion=_offered)
    ] = None,
) -> None:
    """Run an unmodified script on fullshard, with local ranks if asked; --trace DIR records some steps."""
    # `__main__` has run it before it comes here, so that a script's traceback has none of typer.
    from fullshard.tools.run_cli import main

    main("fullshard run", words or [])


@takes(VerifyOptions)
def verify(
    model: Annotated[
        str,
        argument(
            "Your training script; or a function without arguments that returns a plain model, or (model, "
            "batch).",
            "SCRIPT|MODULE:FUNCTION",
        ),
    ],
    arguments: Annotated[
        list[str] | None, argument("What the script is given.", "-- ARGUMENTS")
    ] = None,
    *,
    keep: Annotated[Path | None, option("Folder for the records.", "DIR", panel="Results")] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.", panel="Results")] = False,
    is_whole: Annotated[bool, typer.Option("--whole", hidden=True)] = False,
    **options: Any,
) -> None:
    """Train for some steps sharded and not sharded, and say where they differ.

    Losses, outputs of every module, gradients, parameters, buffers; the first module that differs; causes
    that it knows, with what to do. Memory and time are with recording on: compare measures without.
    """
    from fullshard.tools.verify.running import run_verify

    given = {"model": model, "arguments": tuple(arguments or ()), **options}
    code = run_verify(
        given, os.environ, sys.argv[2:], keep=keep, is_whole=is_whole, as_json=as_json
    )
    raise typer.Exit(code)


class ProgramCommand(Command):
    """Takes what follows a script, or -m and its module, as the script's own, as Python does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with_value = [o for p in self.params if not getattr(p, "is_flag", False) for o in p.opts]
        words, arguments = split_program(args, with_value)
        return super().parse_args(ctx, [*words, "--", *arguments] if arguments else words)


def compare(
    words: Annotated[
        list[str] | None, argument("Your training script, and its arguments.", "SCRIPT [ARGUMENTS]")
    ] = None,
    *,
    module: Annotated[str | None, option("A module, in place of a script.", "MODULE", "-m")] = None,
    ranks: Annotated[int, option("Local ranks.", "N", least=2)] = 2,
    steps: Annotated[
        int, option("Optimizer steps: recorded, and timed after a few more.", "N", least=1)
    ] = 10,
    rounds: Annotated[int, option("How often each engine is timed.", "N", least=1)] = 3,
    device: Annotated[
        str | None,
        option("cpu or cuda, whose memory counts. Default: cuda if there is one.", "KIND"),
    ] = None,
    comm: Annotated[
        str,
        option("How fullshard's ranks exchange bytes: auto, process_group or collectives.", "WAY"),
    ] = "auto",
    timeout: Annotated[float, option("Seconds for each run.", "SECONDS", least=1)] = 300.0,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
    as_md: Annotated[bool, flag("--md", "Print a table in Markdown, for an issue.")] = False,
    out: Annotated[Path | None, option("Write the JSON object to a file as well.", "FILE")] = None,
    run_label: Annotated[str, typer.Option("--run", hidden=True)] = "",
    records: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a script on PyTorch's FSDP and on fullshard: same values? how much time and memory?

    Losses and gradients bit by bit, time of a step with its spread, peak memory, and a
    verdict in one line. Nothing in the script has to be changed.
    """
    from fullshard.local_ranks import num_gpus, threads_for
    from fullshard.tools.job import check_local_ranks
    from fullshard.tools.launch import place_in
    from fullshard.tools.verify.engines import CompareOptions

    script, *arguments = [*([module] if module else []), *(words or [])] or [""]
    try:
        if not script:
            raise OptionError("name a script, or a module with -m.")
        if module and not has_module(module):
            raise OptionError(f"-m {module}: there is no such module here.")
        options = CompareOptions(
            script,
            ranks=ranks,
            steps=steps,
            rounds=rounds,
            device=device or ("cuda" if num_gpus() else "cpu"),
            comm=comm,
            timeout_s=timeout,
            arguments=tuple(arguments),
            is_module=bool(module),
        )
        check_local_ranks(options.device, ranks)
        if out is not None:
            check_file(out)
        place = place_in(os.environ)
        if place is not None and records is None:
            raise OptionError(
                f"compare starts its ranks itself. Run it without {place.started_by}."
            )
    except OptionError as error:
        raise refuse("compare", error) from None
    from fullshard.tools.report import write_file
    from fullshard.tools.verify import switch

    threads = threads_for(ranks, os.environ)
    if place is not None and records is not None:
        raise typer.Exit(switch.rank_of(options, place, records, run_label, threads))
    try:
        found = switch.compare_engines(options, sys.argv[2:], threads=threads)
    except KeyboardInterrupt:
        print("fullshard compare: stopped", file=sys.stderr)
        raise typer.Exit(Exit.FAILED) from None
    switch.show(found, layout="json" if as_json else "md" if as_md else "table")
    if out is not None:
        try:
            write_file(out, json_text(switch.as_dict(found), indent=2))
        except OptionError as error:
            raise refuse("compare", error) from None
    raise typer.Exit(found.code)


def replay(
    folder: Annotated[Path, argument("What debug(replay=) has written.", "DIR")],
    target: Annotated[
        str,
        argument(
            "A function without arguments that builds and shards the model as the recorded run did.",
            "MODULE:FUNCTION",
        ),
    ],
    rank: Annotated[
        int | None, option("The rank whose part is replayed. Default: all.", "N")
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Run a recorded step again, and name the first module whose output differs.

    Inputs of the step are unpickled: replay only what you have recorded, or trust.
    """
    import fullshard
    from fullshard.errors import MisuseError
    from fullshard.tools.user_model import look_at_model

    code = look_at_model(
        "replay",
        target,
        os.environ,
        lambda model: fullshard.replay(folder, model, rank=rank),
        unusable=(OptionError, MisuseError),  # a rank that was not recorded
        as_json=as_json,
    )
    raise typer.Exit(code)
