"""What is true of a bundle: its storage, its segments on every tier, its place at rest."""
