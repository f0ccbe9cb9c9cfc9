"""What the baselines share that run other people's packages. The packages do the work; nothing here imitates them."""
