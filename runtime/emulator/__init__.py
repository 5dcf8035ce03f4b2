"""PTX emulator: executes the PTX text MiniTriton emits, on numpy arrays."""
