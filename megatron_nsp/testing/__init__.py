"""What `megatron-nsp verify` and the tests share: local ranks, an oracle, random plans, counters."""
