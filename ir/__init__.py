"""The tile IR: data types, layouts, the `mt` dialect, targets and diagnostics.

Knows no other room.
"""
