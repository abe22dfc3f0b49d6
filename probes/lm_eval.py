"""Grafts in lm-evaluation-harness: the model type `engram`, and its command with that type known.

    python -m engram_graft.probes.lm_eval --model engram --model_args pretrained=runs/demo --tasks lambada_openai --batch_size 8

`arm=base` (or any other arm of the report) beside `pretrained` evaluates that arm. A model in memory needs none of this:
`HFLM(pretrained=model, tokenizer=tokenizer)` takes a grafted model as any other. Needs `pip install "engram-graft[lm-eval]"`.
"""

import contextlib
import sys
from functools import cache
from typing import Any

import torch

from engram_graft.checkpoint import load_graft
from engram_graft.errors import UserError
from engram_graft.probes.arms import arms_of


@cache
def register() -> type:
    """Make lm-evaluation-harness know `--model engram`; returns the class. Raises `UserError` if it is not installed."""
    try:
        from lm_eval.api.registry import register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(f'lm-evaluation-harness is not installed ({error}): pip install "engram-graft[lm-eval]"') from error

    @register_model("engram")
    class EngramLM(HFLM):
        """A graft directory as lm-evaluation-harness's model.

        Args:
            pretrained: the graft's directory, or a merged one.
            arm: what is evaluated, see `ARMS`.
            base, dtype: as for `load_graft`.
            device: where the model goes; None: a GPU if there is one.
            options: HFLM's own, e.g. batch_size and max_length.
        """

        def __init__(
            self,
            pretrained: str,
            arm: str = "graft",
            base: str | None = None,
            dtype: str | None = None,
            device: str | None = None,
            **options: Any,
        ):
            model, tokenizer = load_graft(pretrained, base=base, dtype=dtype)
            model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            arms = arms_of(model)
            if arm not in arms:
                raise UserError(f"arm={arm!r}: this graft has {', '.join(arms)}")
            self.stays = contextlib.ExitStack()  # in its arm as long as it lives
            self.stays.enter_context(arms[arm](model))
            super().__init__(pretrained=model, tokenizer=tokenizer, **options)

    return EngramLM


def main() -> None:
    """lm-evaluation-harness's command line."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
