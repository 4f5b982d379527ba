"""What is wrong in Megatron 0.19.x for us, mended at run time until it is mended there."""
