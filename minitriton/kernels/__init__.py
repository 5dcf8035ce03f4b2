"""A library of kernels written in the language, for torch tensors on a GPU or in the emulator.

Each family is one file, or a few whose names begin alike: flat functions with autograd,
`torch.library` operators underneath (so that `torch.compile(fullgraph=True)` works), and a plain
torch reference beside them.
"""

from minitriton.kernels.adamw import AdamW
from minitriton.kernels.attention import attention, attention_dropout_mask, attention_reference
from minitriton.kernels.attention_packed import packed_attention, packed_attention_reference
from minitriton.kernels.attn_res import attn_res_mix, attn_res_mix_reference
from minitriton.kernels.attn_res_phases import (
    attn_res_merge,
    attn_res_phase1,
    attn_res_phase1_reference,
)
from minitriton.kernels.attn_res_schedule import BlockAttnRes
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from minitriton.kernels.dropout import dropout, dropout_reference
from minitriton.kernels.embedding import embedding, embedding_reference, tied_embedding
from minitriton.kernels.gradient_sum import GradientSum
from minitriton.kernels.kda import chunk_kda, chunk_kda_reference
from minitriton.kernels.kda_decode import recurrent_kda, recurrent_kda_reference
from minitriton.kernels.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from minitriton.kernels.linear import gelu_mlp, gelu_mlp_reference, linear, linear_reference
from minitriton.kernels.mla_absorb import (
    mla_absorb_query,
    mla_absorb_query_reference,
    mla_value_up,
    mla_value_up_reference,
)
from minitriton.kernels.mla_cache import (
    mla_cache_dequantise,
    mla_cache_write,
    mla_cache_write_reference,
)
from minitriton.kernels.mla_decode import mla_decode, mla_decode_reference
from minitriton.kernels.mla_prefill import mla_attention, mla_attention_reference
from minitriton.kernels.moe_experts import (
    expert_tile_rows,
    local_experts,
    moe_experts,
    moe_experts_reference,
)
from minitriton.kernels.moe_mxfp4 import moe_experts_mxfp4
from minitriton.kernels.moe_router import moe_route
from minitriton.kernels.moe_routing import Routing, moe_route_reference, padded_rows
from minitriton.kernels.muon import (
    PerHeadMuon,
    muon_step_,
    muon_step_reference,
    newton_schulz,
    newton_schulz_reference,
)
from minitriton.kernels.mxfp4 import (
    mxfp4_dequantize,
    mxfp4_dequantize_reference,
    mxfp4_quantize,
    mxfp4_quantize_reference,
)
from minitriton.kernels.norms import (
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from minitriton.kernels.quantile_balancing import (
    quantile_bias,
    quantile_bias_from_histogram,
    quantile_bias_reference,
    quantile_histogram,
)
from minitriton.kernels.scalar_residual import scalar_residual, scalar_residual_reference
from minitriton.kernels.short_conv import short_conv, short_conv_reference
from minitriton.kernels.short_conv_step import short_conv_step, short_conv_step_reference
from minitriton.kernels.situ import situ, situ_glu, situ_glu_reference, situ_reference
from minitriton.kernels.situ_gemm import situ_glu_linear, situ_glu_linear_reference
from minitriton.kernels.softmax import softmax, softmax_reference

__all__ = [
    "AdamW",
    "BlockAttnRes",
    "GradientSum",
    "KernelArgumentError",
    "PerHeadMuon",
    "Routing",
    "add_layer_norm",
    "add_layer_norm_reference",
    "attention",
    "attention_dropout_mask",
    "attention_reference",
    "attn_res_merge",
    "attn_res_mix",
    "attn_res_mix_reference",
    "attn_res_phase1",
    "attn_res_phase1_reference",
    "chunk_kda",
    "chunk_kda_reference",
    "cross_entropy",
    "cross_entropy_reference",
    "dropout",
    "dropout_reference",
    "embedding",
    "embedding_reference",
    "expert_tile_rows",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "gelu_mlp",
    "gelu_mlp_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear",
    "linear_reference",
    "local_experts",
    "mla_absorb_query",
    "mla_absorb_query_reference",
    "mla_attention",
    "mla_attention_reference",
    "mla_cache_dequantise",
    "mla_cache_write",
    "mla_cache_write_reference",
    "mla_decode",
    "mla_decode_reference",
    "mla_value_up",
    "mla_value_up_reference",
    "moe_experts",
    "moe_experts_mxfp4",
    "moe_experts_reference",
    "moe_route",
    "moe_route_reference",
    "muon_step_",
    "muon_step_reference",
    "mxfp4_dequantize",
    "mxfp4_dequantize_reference",
    "mxfp4_quantize",
    "mxfp4_quantize_reference",
    "newton_schulz",
    "newton_schulz_reference",
    "packed_attention",
    "packed_attention_reference",
    "padded_rows",
    "quantile_bias",
    "quantile_bias_from_histogram",
    "quantile_bias_reference",
    "quantile_histogram",
    "recurrent_kda",
    "recurrent_kda_reference",
    "rms_norm",
    "rms_norm_reference",
    "scalar_residual",
    "scalar_residual_reference",
    "short_conv",
    "short_conv_reference",
    "short_conv_step",
    "short_conv_step_reference",
    "situ",
    "situ_glu",
    "situ_glu_linear",
    "situ_glu_linear_reference",
    "situ_glu_reference",
    "situ_reference",
    "softmax",
    "softmax_reference",
    "tied_embedding",
]
