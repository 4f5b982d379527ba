"""Nested sequence parallelism for variable-length LLM training on Megatron-Core.

The package has three borders that imports cross in one direction only: numpy (planning, layout and
schedule as data), torch (groups, kernels, execution) and megatron (flags, layer spec, data, loop).
Importing this module imports none of them.
"""

__version__ = "0.1.0"
