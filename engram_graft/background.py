"""Background text: what has nothing to do with the training data, so that what is frequent in it should not be learned."""

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from engram_graft.data import load_data
from engram_graft.errors import UserError
from engram_graft.grafted import disable_graft
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning
from engram_graft.scoring import alone

SAMPLES, LENGTH = 64, 192  # texts that the base writes by itself, and tokens of each


def background_texts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: str | None = None, seed: int = 0
) -> list[list[int]]:
    """Token ids of the text file or folder `path`; without one, of what the base of a grafted model writes when nothing is asked.

    A sample begins with the token that begins texts, or else ends them, is drawn at temperature 1 and stops at eos; it is a function
    of `seed` and leaves the random state as it was.

    Raises:
        UserError: `path` cannot be read, or holds no plain text.
    """
    if path is not None:
        if not (documents := load_data(path).texts):
            raise UserError(f"train.background={path}: must be plain text, which this is not")
        return [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in documents]
    base: Any = unwrap(model)
    eos = tokenizer.eos_token_id
    start = next((id for id in (tokenizer.bos_token_id, eos) if id is not None), 0)
    ids = torch.full((SAMPLES, 1), start, device=base.device)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=LENGTH, eos_token_id=eos, pad_token_id=eos or 0
    )
    devices = [base.device] if base.device.type == "cuda" else []
    with torch.random.fork_rng(devices), disable_graft(model, lora=True), no_learning(model), alone(settings, base):
        torch.manual_seed(seed)
        output = base.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    texts = [row[1:] for row in output.tolist()]
    return [row[: row.index(eos)] if eos in row else row for row in texts]
