"""A GPT in the style of nanoGPT, trained on MiniTriton kernels: `python -m examples.nanogpt`."""
