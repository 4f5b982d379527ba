"""Megatron's loop on CPU ranks, for tests and for trying out (`--nsp-cpu`)."""
