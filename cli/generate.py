"""`engram-graft generate`: the graft and its base side by side on a prompt."""

from typing import Annotated

import typer

from engram_graft.cli.common import Device, Json, RecordedDtype, TableDir, TableTier, emit, examples, open_graft, quiet
from engram_graft.errors import UserError

HELP_END = examples(
    'engram-graft generate runs/demo --prompt "The capital of Velmora is"',
    'engram-graft generate runs/demo --prompt "…" --json',
)


def command(
    directory: Annotated[str, typer.Argument(help="A graft or merged directory.")],
    prompt: Annotated[list[str], typer.Option(help="Text to continue; may be given several times.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 24,
    dtype: RecordedDtype = None,
    table_tier: TableTier = None,
    table_dir: TableDir = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Continue a prompt greedily with the graft and with the bare base."""
    from engram_graft.grafted import disable_graft
    from engram_graft.scoring import greedy

    if any(not text.strip() for text in prompt):
        raise UserError("--prompt is empty: give a text to continue")
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: must be 1 or more")
    quiet()
    model, tokenizer = open_graft(directory, device, dtype, table_tier, table_dir)

    def answers() -> list[str]:
        return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in greedy(model, tokenizer, prompt, max_new_tokens)]

    grafted = answers()
    with disable_graft(model, lora=True):
        bare = answers()
    rows = [{"prompt": p, "graft": g, "base": b} for p, g, b in zip(prompt, grafted, bare, strict=True)]
    if json:
        emit({"answers": rows})
        return
    for row in rows:
        print(f"{row['prompt']}\n  graft: {row['graft']!r}\n  base:  {row['base']!r}")
