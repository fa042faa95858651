"""6xx: kernels, memory, processes."""
