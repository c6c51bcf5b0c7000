"""Arguments that several commands read in the same way: the model, and the CPU's share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from sparsekv.cli.errors import CommandLineError

KNOWN_MODELS = (
    "qwen3-30b-a3b, mixtral-8x7b, deepseek-v2-lite, smollm2, deepseek-v4-flash, deepseek-v4-pro"
)


ModelArgument = Annotated[
    str | None,
    typer.Argument(help=f"A known name ({KNOWN_MODELS}), a model folder or a config.json."),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", envvar="SPARSEKV_MODEL", help="The same, by name.")
]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size",
        "--batch",
        envvar=["SPARSEKV_BATCH_SIZE", "SPARSEKV_BATCH"],
        help="Sequences at a time.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="bfloat16, float16 or float32; else the model's own, or bfloat16."),
]


def one_model(context: typer.Context, argument: str | None, option: str | None) -> str:
    """The model, given in one of two ways; an argument wins over the environment.

    Args:
        context: of the command; its option is named `model_option`.
        argument: None: not given.
        option: None: neither given nor in the environment.
    Raises:
        CommandLineError: none, or two different ones.
    """
    source = context.get_parameter_source("model_option")
    if argument is not None and option is not None and source is not None:
        if source.name == "COMMANDLINE" and option != argument:
            raise CommandLineError(f"--model={option} and {argument}: give one model, once")
        return argument
    name = argument if argument is not None else option
    if name is None:
        raise CommandLineError(
            f"no MODEL: give a known name ({KNOWN_MODELS}), a model folder or a config.json, as "
            f"`sparsekv {context.info_name} qwen3-30b-a3b` or with --model"
        )
    return name


def parse_share(text: str) -> float | Literal["auto"]:
    """`auto`, or a number; whether it is a share is checked where it is used.

    Raises:
        CommandLineError: neither.
    """
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError as error:
        raise CommandLineError(
            f"--cpu-share={text}: must be auto, or a number from 0 to 1; leave it out for auto"
        ) from error
