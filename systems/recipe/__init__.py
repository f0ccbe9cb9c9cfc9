"""What every engine of ours shares, the oracle too: a user's model, recomputation, and the decisions of a step.

No byte of a bundle is moved here, and nothing here knows of one.
"""
