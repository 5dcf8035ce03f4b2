"""A small Kimi K3: KDA and gated MLA layers, AttnRes, LatentMoE; run `python -m examples.k3`."""
