"""A table's values in fewer bits: bfloat16, or float8 (e4m3) with a power of two for every 32 channels, as DeepSeek-V4.1 has them."""

import torch
from torch import Tensor

from engram_graft.errors import UserError

CODES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.float8_e4m3fn}
GROUP = 32  # channels that share a scale
LARGEST = 448  # of e4m3


def scales(dim: int) -> int:
    """How many scales a row of `dim` channels has."""
    return (dim + GROUP - 1) // GROUP


def encode(values: Tensor, code: str) -> dict[str, Tensor]:
    """`values` `[n, dim]` as they are stored: "values" and, for float8, "scale" (e8m0, `[n, scales(dim)]`).

    Raises:
        UserError: one of them is beyond what the code can say.
    """
    if values.dtype == CODES[code]:
        return {"values": values}
    if not (values if code == "float8" else values.to(CODES[code])).isfinite().all():
        raise UserError(f"a table has values that {code} cannot say, up to {float(values.abs().max()):.3g}: keep them in float32")
    if code != "float8":
        return {"values": values.to(CODES[code])}
    if not hasattr(torch, "float8_e8m0fnu"):
        raise UserError(f"float8 tables need torch 2.7 or newer, for their scales; this is {torch.__version__}: use bfloat16")
    # the smallest scale that reaches a group's largest value, so that what was decoded comes back as it was
    padded = torch.nn.functional.pad(values.float(), (0, -values.shape[1] % GROUP))
    mantissa, exponent = padded.unflatten(1, (-1, GROUP)).abs().amax(-1).frexp()  # largest = mantissa * 2^exponent
    exponent = torch.where(mantissa > LARGEST / 512, exponent - 8, exponent - 9).clamp(-127, 127)  # 448 is 0.875 * 2^9
    scaled = padded.unflatten(1, (-1, GROUP)).ldexp(-exponent[..., None]).flatten(1)[:, : values.shape[1]]
    scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return {"values": scaled.to(torch.float8_e4m3fn), "scale": scale}


def decode(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What `encode` stored, `[..., dim]` with scales `[..., scales(dim)]`, in `dtype`."""
    if scale is None:
        return values.to(dtype)
    spread = scale.float().repeat_interleave(GROUP, -1)[..., : values.shape[-1]]
    return (values.float() * spread).to(dtype)
