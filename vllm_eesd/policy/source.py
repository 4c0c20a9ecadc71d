"""How a draft was made, which says what its acceptance tells of and how the target judges it."""

from __future__ import annotations

#: The draft model's most probable tokens; tokens drawn from its distribution, verified by the ratio of probabilities;
#: tokens drawn by the noise with which the target's will be, verified by equality; what followed in the text before.
GREEDY, DRAWN, SHARED_NOISE, NGRAM = range(4)
