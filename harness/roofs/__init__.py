"""What a machine's memories, links and units can reach at most, measured: the numbers behind a hardware profile."""
