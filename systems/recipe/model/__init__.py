"""A user's model: its units, its calls, what it may do while an engine has it, and what it is given back."""
