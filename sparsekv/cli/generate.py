"""`sparsekv generate`: the options, checked and turned into a `GenerateRequest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsekv.cli.arguments import parse_share
from sparsekv.cli.errors import CommandLineError
from sparsekv.cli.prompts import RANDOM_DEMO, read_prompt, refuse_text
from sparsekv.cli.sizes import parse_tokens


def generate(
    model_folder: Annotated[
        Path | None, typer.Argument(help="A folder as save_pretrained or `hf download` writes it.")
    ] = None,
    demo: Annotated[
        str | None,
        typer.Option(
            help="Use a demo model instead: smollm2, which has a prompt of its own, or "
            "deepseek-v4, of random weights, which reads and writes token ids."
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="The prompt; - reads standard input, as does text piped to a model folder."
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A text file with the prompt; - reads standard input.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 256,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on to --max-new-tokens where the answer would end."),
    ] = False,
    cpu_share: Annotated[
        str,
        typer.Option(
            help="Share of the tokens outside the window that the CPU attends to: auto, as this "
            "machine has it, or 0 to 1."
        ),
    ] = "auto",
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Let the CPU borrow pinned tokens, as each step has it."),
    ] = False,
    window_size: Annotated[
        int,
        typer.Option(help="Newest tokens (DeepSeek-V4: compressed entries), kept on the GPU."),
    ] = 256,
    block_size: Annotated[
        int, typer.Option(help="Tokens of a block; the window is a multiple of it.")
    ] = 64,
    entry_format: Annotated[
        str,
        typer.Option(
            help="DeepSeek-V4's entries: native, or packed (584 bytes; smaller, not exact)."
        ),
    ] = "native",
    max_tokens: Annotated[
        str | None,
        typer.Option(help="Most tokens of the cache, as 32K or 32768; else what the run needs."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cuda:<index> or cpu (simulated accelerator); else cuda where there is one."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; else as the checkpoint says.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Then run the unpatched model: exit code 1 unless every token is the same.",
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """Answer one prompt, greedily, with the KV cache in four regions."""
    if (model_folder is None) == (demo is None):
        raise CommandLineError(
            f"MODEL_FOLDER={model_folder}, --demo={demo}: exactly one of them is needed; give a "
            "model's folder, or --demo smollm2"
        )
    if demo == RANDOM_DEMO:
        refuse_text({"--prompt": prompt, "--prompt-file": prompt_file, "--raw": raw})
    text = read_prompt(prompt, prompt_file, read_pipe=demo is None)
    if text is None and demo is None:
        raise CommandLineError(
            "no prompt: a model needs one; give --prompt or --prompt-file, or pipe text in"
        )
    if max_new_tokens < 1:
        raise CommandLineError(
            f"--max-new-tokens={max_new_tokens}: must be at least 1; give 64, say"
        )
    share = parse_share(cpu_share)
    limit = None if max_tokens is None else parse_tokens("--max-tokens", max_tokens)

    from sparsekv.cli.quiet import quiet_libraries

    quiet_libraries()
    from sparsekv import CacheConfig
    from sparsekv.cli.devices import parse_device, parse_dtype, parse_entry_format
    from sparsekv.cli.run import GenerateRequest, run

    request = GenerateRequest(
        model_folder=model_folder,
        demo=demo or "",
        prompt=text,
        raw=raw,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        config=CacheConfig(
            cpu_share=share,
            elastic=elastic,
            window_size=window_size,
            block_size=block_size,
            max_tokens=limit,
            entry_format=parse_entry_format(entry_format),
        ),
        device=parse_device(device),
        dtype=None if dtype is None else parse_dtype(dtype),
        compare=compare,
        json=json,
    )
    if not run(request):
        raise typer.Exit(1)
