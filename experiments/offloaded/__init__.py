"""What ``bench_offload`` is made of.

cells (model, card, cap) -> profile (layer times) -> plans -> running (a child)
"""
