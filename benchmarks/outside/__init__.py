"""Programs with the training loops of other people's packages, judged by `gpudist verify`."""
