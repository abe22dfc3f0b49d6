"""The model card of a graft or merged directory: what it is, how to load it, what was checked and measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def model_card(directory: Path, described: Mapping[str, Any]) -> str:
    """Markdown from `engram_config.json` and, where the directory has them, `identity.json` and `probes.json`."""
    config, base, merged = described["config"], described["base"]["name"], described["merged"]
    lines = ["---", "library_name: engram-graft", "tags: [engram, memory]"]
    # a hub id as the base is a link on the hub; a path or an alias would be a broken one
    if base.count("/") == 1 and not base.startswith((".", "/", "~")) and not Path(base).exists():
        lines.append(f"base_model: {base}")
    lines += ["---", "", f"# Engram memory {'merged into' if merged else 'for'} {base}", ""]
    lines.append(
        f"Layers {config['layer_ids']}, n-grams of order 2 to {config['max_ngram_size']}, {config['n_head_per_ngram']} heads of "
        f"{config['n_embed_per_ngram'] // config['n_head_per_ngram']} channels an order. Made with engram-graft."
    )
    lines += [
        "",
        "```python",
        "import engram_graft as eg",
        'model, tokenizer = eg.load_graft("path/to/this/directory")',
        "```",
        "",
    ]
    if merged:
        lines.append(
            "`AutoModelForCausalLM.from_pretrained` opens this directory too, as the base with LoRA merged and **without the memory**; "
            "it lists the memory's tensors as unexpected."
        )
    elif "adapter_model.safetensors" in described["files"]:
        lines.append(
            "`AutoModelForCausalLM.from_pretrained` on this directory would load the LoRA adapter **without the memory**; use `load_graft`."
        )
    lines += _results(directory)
    return "\n".join(lines) + "\n"


def _results(directory: Path) -> list[str]:
    lines: list[str] = []
    identity, probes = directory / "identity.json", directory / "probes.json"
    if identity.is_file():
        report = json.loads(identity.read_text(encoding="utf-8"))
        lines += [
            "",
            f"Before training {report['logits']:,} logits were compared with the base's: all equal, bit for bit.",
        ]
    if probes.is_file():
        report = json.loads(probes.read_text(encoding="utf-8"))
        arms = {arm: scores for arm, scores in report["arms"].items() if "recall" in scores}
        if arms:
            lines += ["", "| arm | recall | held-out paraphrases | free answer exact |", "| --- | --- | --- | --- |"]
        for arm, scores in arms.items():
            numbers = (
                scores["recall"]["greedy_exact"],
                scores.get("paraphrase", {}).get("greedy_exact"),
                scores.get("task_exact", {}).get("exact_match"),
            )
            lines.append(f"| {arm} | " + " | ".join("" if n is None else f"{n:.1%}" for n in numbers) + " |")
        if "locality" in report:
            lines += ["", f"KL to the base on neutral text: {report['locality']['kl']:.2g} nats a token."]
    return lines
