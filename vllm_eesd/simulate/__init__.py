"""Replay of dense traces: what every policy would have done on the same recorded acceptance."""
