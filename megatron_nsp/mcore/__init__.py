"""The border to Megatron-Core: flags, layer spec, rotary embedding, data, loss and the loop.

No file of Megatron is changed on disk.
"""
