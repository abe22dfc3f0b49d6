"""The model card of a graft or merged directory: what it is, how to load it, what was checked and measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def model_card(results: Path, described: Mapping[str, Any], export: Mapping[str, Any] | None = None) -> str:
    """Markdown from `engram_config.json` and, where the directory `results` has them, `identity.json` and `probes.json`; `export` is
    what comparing a merged directory with its graft gave."""
    config, base, merged = described["config"], described["base"]["name"], described["merged"]
    lines = ["---", f"library_name: {'transformers' if merged else 'engram-graft'}", "tags: [engram, memory, engram-graft]"]
    # a hub id as the base is a link on the hub; a path or an alias would be a broken one
    if base.count("/") == 1 and not base.startswith((".", "/", "~")) and not Path(base).exists():
        lines.append(f"base_model: {base}")
    lines += ["---", "", f"# Engram memory {'merged into' if merged else 'for'} {base}", ""]
    tables = described["tables"]
    lines.append(
        f"Layers {config['layer_ids']}, n-grams of order 2 to {config['max_ngram_size']}, {config['n_head_per_ngram']} heads of "
        f"{config['n_embed_per_ngram'] // config['n_head_per_ngram']} channels an order; {tables['layout']} tables in {tables['code']}. "
        "Made with engram-graft."
    )
    lines += ["", *(_merged() if merged else _graft(described["files"]))]
    lines += _results(results)
    if export is not None:
        lines += ["", _export(export)]
    return "\n".join(lines) + "\n"


def _merged() -> list[str]:
    return [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/directory", trust_remote_code=True)',
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")',
        "```",
        "",
        "This needs transformers 5.24 or newer and nothing else: `modeling_engram.py` is the memory's code. **Without "
        "`trust_remote_code=True` the same line opens the base with LoRA merged and without the memory**; it then lists the memory's "
        "tensors as unexpected. Other auto classes open the base too, whatever the flag. With engram-graft, `engram_graft.load_graft` "
        "opens it to be probed, trained further or exported again.",
    ]


def _graft(files: Mapping[str, str]) -> list[str]:
    lines = ["```python", "import engram_graft as eg", 'model, tokenizer = eg.load_graft("path/to/this/directory")', "```"]
    if "adapter_model.safetensors" in files:
        lines += [
            "",
            "`AutoModelForCausalLM.from_pretrained` on this directory would load the LoRA adapter **without the memory**.",
        ]
    return lines


def _export(export: Mapping[str, Any]) -> str:
    text = (
        f"Reopened and compared with the graft it was made from: logits differ by {export['max_difference']:.2g} at most, "
        f"{export['flips']} of {export['positions']} most likely tokens differ, KL {export['kl']:.2g} nats a token"
    )
    if "questions" in export:
        text += (
            f"; of {export['questions']} questions {export['same_answers']} get the same greedy answer, recall "
            f"{export['recall_before']:.1%} before and {export['recall_after']:.1%} after"
        )
    return text + "."


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
