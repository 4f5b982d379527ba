"""What `megatron-nsp verify` and the tests share: local ranks, oracle, random plans."""
