"""One file per paper table or figure: the cells it needs, the paper's own numbers, how it is drawn. Starts no run."""
