"""Entry point: the commands, and how their errors reach the user.

Every wrong input ends as one line on stderr and exit code 2; Ctrl-C ends with 130; neither shows a
traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from sparsekv.cli.calibrate import calibrate
from sparsekv.cli.console import print_error, stderr_console, stdout_console
from sparsekv.cli.doctor import doctor
from sparsekv.cli.generate import generate
from sparsekv.cli.plan import plan
from sparsekv.errors import SparseKVError

EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130

# typer carries click inside itself in newer versions and imports it in older ones: its base class
# is found, not named.
_UsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

# Options read SPARSEKV_<OPTION>, the same variable for every command that has the
# option; flags win.
_ENVIRONMENT = {"auto_envvar_prefix": "SPARSEKV", "help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="sparsekv",
    help="Long-context generation with a KV cache that lives in GPU and CPU memory at once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings=_ENVIRONMENT)(generate)
app.command(context_settings=_ENVIRONMENT)(plan)
app.command(context_settings=_ENVIRONMENT)(doctor)
app.command(context_settings=_ENVIRONMENT)(calibrate)


@app.command()
def version() -> None:
    """Print the version and leave."""
    from sparsekv import __version__

    stdout_console().print(f"sparsekv {__version__}")


def _print_version_and_exit(requested: bool) -> None:
    if requested:
        version()
        raise typer.Exit()


@app.callback()
def options(
    show_version: bool = typer.Option(
        False,
        "--version",
        is_eager=True,
        callback=_print_version_and_exit,
        help="Print the version and leave.",
    ),
) -> None:
    """Long-context generation with a KV cache that lives in GPU and CPU memory at once."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the command line without the program's name; None: that of this process.
    Returns:
        0 done; 1 `--compare` found a difference, or `doctor` what must be fixed; 2 wrong input;
        130 interrupted.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(given, prog_name="sparsekv", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except SparseKVError as error:
        print_error(str(error))
        code = EXIT_WRONG_INPUT
    except _UsageError as error:
        # `sparsekv` alone raises this with the help, already shown, as its message.
        if type(error).__name__ != "NoArgsIsHelpError":
            print_error(f"{error.format_message()} (see sparsekv --help)")  # type: ignore[attr-defined]
        code = EXIT_WRONG_INPUT
    if code == EXIT_INTERRUPTED:
        stderr_console().print("interrupted", style="yellow")
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
