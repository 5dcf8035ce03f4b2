"""The roofline suite: `python -m minitriton bench`.

Kernels of MiniTriton beside those of Triton, torch and torch.compile, against ceilings which the
same run measures. `command` is the command line, `catalog` the list of cases, `cases_*` build them,
`worker` measures in a process of its own, `supervisor` watches it, `report` and `page` write what
came out.
"""
