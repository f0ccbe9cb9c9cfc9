"""Memory of the tiers: accounts, the device's pool, mappings of the host, files of the disk."""
