"""What moves bundles, gradients and inputs: each acts when it is told to."""
