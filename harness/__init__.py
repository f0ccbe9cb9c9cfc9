"""Measure and keep: one fresh process a run, one clock, one record a run. Knows systems only through their protocol."""
