"""What a system would do on hardware that need not be here: the step observed without arithmetic, planned and simulated."""
