"""One rank's device: its memory and its accounts, host and disk beside it, the lanes that copy, and what watches them."""
