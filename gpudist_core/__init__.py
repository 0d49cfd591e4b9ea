"""gpudist_core: strategies, static tensors, sharded pipelines and exact training steps for production (not yet written)."""
