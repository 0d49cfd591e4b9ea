"""Sum gradients over all replicas in one collective, then clip them."""
