"""Batch after batch: where lengths come from, what a step draws, and its plan ahead of time.

No torch.
"""
