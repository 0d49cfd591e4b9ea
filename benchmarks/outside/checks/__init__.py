"""Plain TensorFlow that shows a fault of a package without gpudist. Each prints its figures as JSON."""
