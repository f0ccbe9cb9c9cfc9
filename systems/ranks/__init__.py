"""Several ranks: who they are, what they tell each other, and the link that their collectives go through."""
