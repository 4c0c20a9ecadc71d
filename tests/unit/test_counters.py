"""The counters that every table and metric is made from."""

from vllm_eesd.round.counters import DraftStats, Round


def count(stats, request_id, draft, emitted):
    """Count a round and keep it, as the runners do."""
    stats.count_lengths(len(draft), len(emitted) - 1)
    stats.record(lambda: [Round(request_id, draft, len(emitted) - 1, emitted)])


def test_positions_are_counted_unconditionally():
    stats = DraftStats(3)
    count(stats, "a", draft=[1, 2, 3], emitted=[1, 2, 9])  # two accepted
    count(stats, "a", draft=[4], emitted=[4, 5])  # all accepted
    count(stats, "b", draft=[], emitted=[7])
    stats.count_ngrams(1, 1)
    assert stats.as_dict() == {
        "rounds": 3,
        "drafted": 4,
        "accepted": 3,
        "emitted": 6,
        "copied": 1,
        "copied_accepted": 1,
        "drafted_per_position": [2, 1, 1],
        "accepted_per_position": [2, 1, 0],
        "draft_length_histogram": [1, 1, 0, 1],
        "estimated_speedup": None,
        "drafted_not_finite": 0,
    }
    stats.count_time(decode_ms=2.0, plain_ms=3.0)
    assert stats.speedup() == 1.5
    assert stats.summary() == (
        "2.00 tokens a round, 1.33 drafted, 75% of them accepted, 25% copied from the text, "
        "33% of rounds without a draft; "
        "estimated speedup over plain decoding: 1.50x"
    )
    stats.reset()
    assert stats.as_dict()["rounds"] == 0 and stats.speedup() is None


def test_rounds_are_recorded_from_the_first_call_on():
    stats = DraftStats(2)
    count(stats, "a", [1], [1, 2])
    assert stats.take_rounds() == []
    count(stats, "a", [3, 4], [3, 8])
    assert stats.take_rounds() == [Round("a", [3, 4], 1, [3, 8])]
    assert stats.take_rounds() == []


def test_the_last_call_ends_the_recording():
    stats = DraftStats(2)
    stats.take_rounds()
    count(stats, "a", [3], [3, 8])
    stats.record(lambda: [Round("b", [], 0, [4])])  # known only when it is asked for
    assert stats.recording
    assert stats.take_rounds(last=True) == [Round("a", [3], 1, [3, 8]), Round("b", [], 0, [4])]
    assert not stats.recording
    stats.record(lambda: [Round("b", [], 0, [4])])
    count(stats, "a", [3], [3, 8])
    assert stats.take_rounds() == []


def test_a_record_nobody_takes_does_not_grow_without_bound():
    stats = DraftStats(1)
    stats.MAX_RECORDED_ROUNDS = 10
    stats.take_rounds()
    for _ in range(100):
        count(stats, "a", [], [1])
    assert len(stats.take_rounds()) <= 10


def test_rounds_in_which_nobody_drafted_count_as_one_each():
    looked_at, rested = DraftStats(2), DraftStats(2)
    for name in ("a", "b"):
        count(looked_at, name, [], [1])
    rested.count_lengths(0, 0, num_rounds=2)
    assert rested.as_dict() == looked_at.as_dict()
