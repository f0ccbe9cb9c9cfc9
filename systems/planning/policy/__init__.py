"""What strategies build with: bases and options, chunks, divisions of the device, caches and rules of eviction."""
