"""Two equal cards: our runtime beside plain JAX and PyTorch's FSDP2."""
