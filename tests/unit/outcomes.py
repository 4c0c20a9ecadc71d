"""Outcomes for policies to observe, with what most tests leave out filled in."""

import numpy as np

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy import GREEDY, NGRAM, Outcome


def outcome(slots, num_verified, num_accepted, confidences=None, from_ngrams=None, updates_shared_prior=None):
    """Return an Outcome; confidences may be narrower than the longest draft, unknown where left out."""
    num_rows = len(slots)
    wide = np.full((num_rows, MAX_SPECULATIVE_TOKENS), np.nan, dtype=np.float32)
    if confidences is not None:
        wide[:, : np.shape(confidences)[1]] = confidences
    return Outcome(
        np.asarray(slots),
        np.asarray(num_verified, dtype=np.int64),
        np.asarray(num_accepted, dtype=np.int64),
        wide,
        np.where(np.zeros(num_rows, dtype=bool) if from_ngrams is None else from_ngrams, NGRAM, GREEDY).astype(np.int8),
        np.ones(num_rows, dtype=bool) if updates_shared_prior is None else np.asarray(updates_shared_prior),
    )
