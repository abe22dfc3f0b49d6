"""The memory of one decoder layer: look up, gate, project, convolve; what comes out is added to the residual stream.

Equations: Engram paper (arXiv 2601.07372) section 2.3 and its demo; per residual stream g:
`gate_g = sigmoid(sqrt-signed(<rms(key_g e), rms(h_g)> / sqrt(D)))`, `v_g = gate_g * value e`, `y_g = v_g + SiLU(conv(rms(v_g)))`.
Plain torch: nothing here knows of transformers.
"""

import contextlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engram_graft.config import LAYER_SEED_STRIDE, EngramConfig
from engram_graft.window import Window

if TYPE_CHECKING:
    from engram_graft.table import EngramTable


class Projection(nn.Module):
    """A linear map that is no `nn.Linear`, so that PEFT's "all-linear" and quantizers leave it alone."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ShortConv(nn.Module):
    """Causal depthwise convolution over the normed values, each residual stream normed on its own.

    Taps are added one by one rather than by `conv1d`: the sum then has one order however the text is cut into calls.
    """

    def __init__(self, config: EngramConfig, width: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(config.hc_mult, width, dtype=dtype, device=device))
        self.weight = nn.Parameter(torch.empty(config.hc_mult * width, 1, config.kernel_size, dtype=dtype, device=device))
        self.dilation, self.eps = config.max_ngram_size, config.conv_eps

    def normed(self, values: Tensor) -> Tensor:
        """Values `[B, T, G, D]`, normed: what the taps read, and what a cached decode has to remember."""
        return F.rms_norm(values, values.shape[-1:], eps=self.eps) * self.norm

    def forward(self, normed: Tensor, window: Window) -> Tensor:
        """`normed` `[B, past + T, G, D]` to `[B, T, G, D]`."""
        taps = self.weight.squeeze(1).unflatten(0, self.norm.shape)  # (G, D, K), the newest token last
        kernel = taps.shape[-1]
        out = window.back(normed, 0, 0.0) * taps[..., -1]
        for k in range(1, kernel):
            out = out + window.back(normed, k * self.dilation, 0.0) * taps[..., kernel - 1 - k]
        return F.silu(out)


def _silent(active: Tensor | None) -> bool:
    """Whether no n-gram of the call contributes, so that the projections need not run: the common decode step of a filtered memory.

    Asked on the CPU only, where the answer is there; elsewhere it would make the device wait.
    """
    if active is None or active.device.type != "cpu" or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return not bool(active.any())


class Engram(nn.Module):
    """The memory in front of one decoder layer.

    Args:
        config: geometry; `layer_ids[index]` is the layer this memory belongs to.
        index: position of this layer in `config.layer_ids`.
        table: what is looked up in, an `EngramTable` or, in an exported model, a `LearnedRows`.
        width: D, channels of one residual stream.
        device: where the parameters are made; on "meta" they get no initial values.
    """

    def __init__(
        self,
        config: EngramConfig,
        index: int,
        table: "EngramTable",
        width: int,
        device: torch.device,
    ):
        super().__init__()
        dtype: torch.dtype = getattr(torch, config.dtype)
        embed = config.orders * config.n_embed_per_ngram
        streams = config.hc_mult
        self.config, self.index, self.layer_id = config, index, config.layer_ids[index]
        self.table = table
        self.key_proj = Projection(embed, streams * width, config.bias, dtype, device)
        self.value_proj = Projection(embed, width, config.bias, dtype, device)
        self.key_norm = nn.Parameter(torch.ones(streams, width, dtype=dtype, device=device))
        self.query_norm = nn.Parameter(torch.ones(streams, width, dtype=dtype, device=device))
        self.short_conv = ShortConv(config, width, dtype, device) if config.conv else None
        if device.type != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values, a function of the seed and the layer alone. One factor is zero, so the memory adds exactly 0. (Rows get
        theirs when they are first looked up.)

        `zero_init="value"`: value projection and convolution are zero. The convolution has to be too: its input is normed, so
        after one step a random one would outweigh the value branch many times. `zero_init="table"`: the rows are zero.
        """
        generator = torch.Generator().manual_seed(self.config.seed * LAYER_SEED_STRIDE + self.layer_id)

        def fill(parameter: Tensor) -> None:
            bound = 1 / math.sqrt(parameter.shape[1])
            value = torch.empty(parameter.shape, dtype=torch.float32)  # float32 on the CPU: equal on every device and dtype
            parameter.copy_(value.uniform_(-bound, bound, generator=generator))

        fill(self.key_proj.weight)
        if self.config.zero_init == "value":
            nn.init.zeros_(self.value_proj.weight)
        else:
            fill(self.value_proj.weight)
        if self.short_conv is not None:
            nn.init.zeros_(self.short_conv.weight)

    def gate(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """How far each stream lets its look-up in: `[B, T, G, 1]` in (0, 1), from `[B, T, E]` and `[B, T, G, D]`."""
        width, eps = hidden.shape[-1:], self.config.gate_eps
        # one product a stream, as the demo has it: fused, they round otherwise, and the root's slope at 0 shows it
        if len(self.key_norm) == 1:
            keys = self.key_proj(embeddings)[..., None, :]
        else:
            weights, bias = self.key_proj.weight.unflatten(0, self.key_norm.shape), self.key_proj.bias
            biases = [None] * len(weights) if bias is None else bias.unflatten(0, self.key_norm.shape)
            keys = torch.stack([F.linear(embeddings, w, b) for w, b in zip(weights, biases, strict=True)], -2)
        keys = F.rms_norm(keys, width, eps=eps) * self.key_norm
        query = F.rms_norm(hidden, width, eps=eps) * self.query_norm
        score = (keys * query).sum(-1, keepdim=True) / math.sqrt(width[0])
        if self.config.gate == "signed_sqrt":
            score = score.abs().clamp_min(1e-6).sqrt() * score.sign()
        return score.sigmoid()

    def forward(
        self, hidden: Tensor, rows: Tensor, window: Window, past: Tensor | None = None, silent: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What to add to `hidden`.

        Args:
            hidden: `[B, T, D]` or `[B, T, G, D]`, any float dtype; the memory computes in its own.
            rows: int64 `[B, T, orders*heads]`.
            window: the positions of this call.
            past: normed values `[B, past, G, D]` of the window's earlier columns; None when there are none.
            silent: bool `[B, T, orders]`, n-grams that this call is to leave out; None: none.

        Returns:
            The addend, in the shape and dtype of `hidden`, and the normed values `[B, past + T, G, D]` to remember (None without
            a convolution).
        """
        device = hidden.device.type
        # entering a context costs a decode step what three small products do
        mixed = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if mixed else contextlib.nullcontext():
            streams = hidden.reshape(*hidden.shape[:2], *self.key_norm.shape).to(self.key_norm.dtype)
            valid = None if window.valid is None else window.back(window.valid, 0, False)
            allowed = window.whole(self.config.orders, hidden.device) if self.config.whole_ngrams else None
            if valid is not None:
                at = valid[..., None].expand(-1, -1, self.config.orders)
                allowed = at if allowed is None else allowed & at
            if silent is not None:
                allowed = ~silent if allowed is None else allowed & ~silent
            if self.config.ngram_dropout and self.table.learning:
                kept = torch.rand(*rows.shape[:2], self.config.orders, device=rows.device) >= self.config.ngram_dropout
                allowed = kept if allowed is None else allowed & kept
            embeddings, active = self.table(rows, allowed)
            embeddings = embeddings.to(self.key_norm.dtype)  # codes do not follow `model.half()`
            if _silent(active):
                values = torch.zeros_like(streams)
            else:
                values = self.gate(embeddings, streams) * self.value_proj(embeddings)[..., None, :]
            if active is not None:  # a bias must not speak where no n-gram does
                values = values.masked_fill(~active.any(-1)[..., None, None], 0)
            out, normed = values, None
            if self.short_conv is not None:
                normed = self.short_conv.normed(values)
                normed = normed if past is None else torch.cat([past, normed], 1)
                out = values + self.short_conv(normed, window)
            if valid is not None:
                out = out.masked_fill(~valid[..., None, None], 0)
            return out.reshape(hidden.shape).to(hidden.dtype), normed
