"""All probes over all arms, as the dictionary that becomes probes.json."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from engram_graft.data import Data, Fact
from engram_graft.encode import encode_texts
from engram_graft.grafted import find_graft
from engram_graft.locate import unwrap
from engram_graft.modes import no_learning
from engram_graft.probes.arms import arms_of
from engram_graft.probes.locality import locality
from engram_graft.probes.recall import recall
from engram_graft.probes.task_exact import free_answers, task_exact
from engram_graft.recipe import ProbeOptions

TEXT_TOKENS = 4096  # of plain training text that are scored


def run_probes(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    options: ProbeOptions | None = None,
    started: Callable[[str], None] = lambda arm: None,
) -> dict[str, Any]:
    """Probe a grafted model on its facts (or its text) and on neutral text.

    Args:
        started: called with each arm's name as it begins.

    Returns:
        {"arms": {arm: {"recall", "paraphrase", "task_exact", "text", "locality"}}, "locality": the graft's, "known": how many trained
        prompts the base answers already, "seen_filter": bool, "examples": [{"prompt", "answer", "base", "graft"}]}. A part is absent
        where the data has nothing for it.
    """
    options = options or ProbeOptions()
    trained = [fact for fact in data.facts if fact.split == "train"] or list(data.facts)
    prompts = [(prompt, fact.answer) for fact in trained for prompt in fact.prompts]
    paraphrases = [(prompt, fact.answer) for fact in trained for prompt in fact.paraphrases]
    arms = arms_of(model)
    report: dict[str, Any] = {"arms": {}}
    answers: dict[str, list[str]] = {}
    for name, arm in arms.items():
        started(name)
        scores: dict[str, Any] = {}
        with arm(model):
            if prompts:
                scores["recall"] = recall(model, tokenizer, prompts, options.batch_size)
            if paraphrases:
                scores["paraphrase"] = recall(model, tokenizer, paraphrases, options.batch_size)
            if trained:
                answers[name] = free_answers(model, tokenizer, trained, options.max_new_tokens, options.batch_size)
                scores["task_exact"] = task_exact(trained, answers[name])
            if data.texts:
                scores["text"] = text_loss(model, tokenizer, data)
        report["arms"][name] = scores
    for name, scores in locality(model, tokenizer, arms).items():
        report["arms"][name]["locality"] = scores
    report["locality"] = report["arms"]["graft"]["locality"]
    report["seen_filter"] = find_graft(model).config.seen_filter
    if prompts:
        report["known"] = round(report["arms"]["base"]["recall"]["greedy_exact"] * len(prompts))
        report["examples"] = _examples(trained, answers["base"], answers["graft"])
    return report


def text_loss(model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: Data, block_size: int = 128) -> dict[str, Any]:
    """{"ce": nats a token on the first tokens of the training text, "n": tokens}: what was trained on, not a held-out score."""
    blocks = encode_texts(data.texts, tokenizer, block_size).select_columns("input_ids").with_format("torch")
    total, n = 0.0, 0
    for block in blocks.take(min(TEXT_TOKENS // block_size, len(blocks)))["input_ids"]:
        ids = block[None].to(unwrap(model).device)
        with no_learning(model):
            total += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        n += ids.shape[1] - 1
    return {"ce": total / n, "n": n}


def _examples(facts: list[Fact], base: list[str], grafted: list[str]) -> list[dict[str, str]]:
    rows = zip(facts, base, grafted, strict=True)
    return [{"prompt": f.prompts[0], "answer": f.answer, "base": b, "graft": g} for f, b, g in rows]
