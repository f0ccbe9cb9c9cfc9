"""Adam: one interface, and its kernels for the CPU, for CUDA, and in plain torch."""
