"""What obeys a plan, on tensors: groups, kernels, backends, executor, attention. No Megatron."""
