"""Every figure in the documentation is measured here, side by side with the alternative, in one run."""
