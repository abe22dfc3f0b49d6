"""What a user without engram-graft does with exported directories; run as a child process in which the toolkit cannot be imported.

Arguments: a JSON file with {"directories": [...], "ids": [[...]], "prompts": [...], "tokens": n}. Prints one JSON object per directory.
"""

import json
import sys
from pathlib import Path
from typing import Any


class Absent:
    """Makes the toolkit, wherever it is installed, not there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "engram_graft":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
assert "engram_graft" not in sys.modules

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

torch.set_num_threads(1)
asked = json.loads(Path(sys.argv[1]).read_text())
for directory in asked["directories"]:
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")

    def answers(prompts: list[str], model: Any = model, tokenizer: Any = tokenizer, **options: Any) -> list[list[int]]:
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        made = model.generate(**batch, max_new_tokens=asked["tokens"], do_sample=False, eos_token_id=-1, **options)
        return made[:, batch["input_ids"].shape[1] :].tolist()

    found: dict[str, Any] = {"class": type(model).__name__}
    if "ids" in asked:
        ids = torch.tensor(asked["ids"])
        again = Path(f"{directory}-again")
        model.save_pretrained(again)
        tokenizer.save_pretrained(again)
        with torch.no_grad():
            logits = model(ids).logits
            saved = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
            found |= {"logits": logits.float().tolist(), "again": torch.equal(saved(ids).logits, logits)}
            found["without_code"] = type(AutoModelForCausalLM.from_pretrained(directory)).__name__
    found["cached"] = [answers([prompt])[0] for prompt in asked["prompts"]]
    found["uncached"] = [answers([prompt], use_cache=False)[0] for prompt in asked["prompts"]]
    found["beams"] = [answers([prompt], num_beams=3)[0] for prompt in asked["prompts"]]
    found["batch"] = answers(asked["prompts"])
    print(json.dumps(found))
