"""A library of kernels written in the language, for torch tensors on a GPU or in the emulator.

Each family is one file: flat functions with autograd, `torch.library` custom operators underneath
(so that `torch.compile(fullgraph=True)` works), and a plain torch reference beside them.
"""

from minitriton.kernels.situ import situ, situ_glu, situ_glu_reference, situ_reference

__all__ = ["situ", "situ_glu", "situ_glu_reference", "situ_reference"]
