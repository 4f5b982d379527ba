"""The policies the search is compared with, one file each.

A policy places the samples of one micro-batch and leaves those without room unplaced; what becomes
of them is decided in `window.py`, for all policies alike.
"""
