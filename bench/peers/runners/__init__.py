"""Scripts that run one engine each, in a Python of its own; `loop.py` says how they are asked.

None of them is imported by the package: they are files that another interpreter reads.
"""
