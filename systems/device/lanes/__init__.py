"""Lanes and their tickets, and the one door through which every copy and every update goes."""
