"""The algorithm: which rows draft one more token, what became of it, and what is learned from that. No engine."""
