"""The kernel library: ready-made kernels written in the language, with their Python entry points."""
