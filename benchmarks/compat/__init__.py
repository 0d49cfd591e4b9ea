"""Which versions of TensorFlow and Keras gpudist works with: every program of the manifest and the main tests, in each."""
