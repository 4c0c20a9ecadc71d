"""The exit head: what turns the hidden state entering the exit layer into draft logits."""
