"""Every figure in the README is measured here, side by side with the alternative, in one run."""
