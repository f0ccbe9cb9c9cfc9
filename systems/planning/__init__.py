"""Decisions as data: the model's index, layout, trace, plan and what can be proved or predicted from them.

Strategies write plans with these types, the substrate carries them out; this package moves no byte and imports neither.
"""
