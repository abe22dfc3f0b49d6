"""A table's values in fewer bits: bfloat16, or float8 (e4m3) with a power of two for every 32 channels, as DeepSeek-V4.1 has them."""

import torch
from torch import Tensor

CODES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.float8_e4m3fn}
GROUP = 32  # channels that share a scale
LARGEST = 448  # of e4m3


def scales(dim: int) -> int:
    """How many scales a row of `dim` channels has."""
    return (dim + GROUP - 1) // GROUP


def encode(values: Tensor, code: str) -> dict[str, Tensor]:
    """`values` `[n, dim]` as they are stored: "values" and, for float8, "scale" (e8m0, `[n, scales(dim)]`)."""
    if code != "float8":
        return {"values": values.to(CODES[code])}
    wide = values.float()
    padded = torch.nn.functional.pad(wide, (0, scales(wide.shape[1]) * GROUP - wide.shape[1]))
    largest = padded.unflatten(1, (-1, GROUP)).abs().amax(-1)  # (n, scales)
    # the smallest power of two that brings the group's largest value into range
    scale = torch.exp2((largest / LARGEST).clamp_min(2.0**-120).log2().ceil()).to(torch.float8_e8m0fnu)
    return {"values": (wide / _spread(scale, wide)).to(torch.float8_e4m3fn), "scale": scale}


def decode(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What `encode` stored, `[..., dim]` with scales `[..., scales(dim)]`, in `dtype`."""
    if scale is None:
        return values.to(dtype)
    return (values.float() * _spread(scale, values)).to(dtype)


def _spread(scale: Tensor, values: Tensor) -> Tensor:
    """Each scale over its channels."""
    return scale.float().repeat_interleave(GROUP, -1)[..., : values.shape[-1]]
