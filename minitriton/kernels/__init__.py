"""A library of kernels written in the language, for torch tensors on a GPU or in the emulator.

Each family is one file: flat functions with autograd, `torch.library` custom operators underneath
(so that `torch.compile(fullgraph=True)` works), and a plain torch reference beside them.
"""

from minitriton.kernels.attn_res import attn_res_mix, attn_res_mix_reference
from minitriton.kernels.norms import (
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from minitriton.kernels.situ import situ, situ_glu, situ_glu_reference, situ_reference

__all__ = [
    "attn_res_mix",
    "attn_res_mix_reference",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "rms_norm",
    "rms_norm_reference",
    "situ",
    "situ_glu",
    "situ_glu_reference",
    "situ_reference",
]
