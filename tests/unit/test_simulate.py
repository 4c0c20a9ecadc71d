"""The replay and what it compares with."""

import json

import numpy as np
import pytest
from synthetic import synthetic_trace

from vllm_eesd import cli
from vllm_eesd.policy import POLICIES, BetaPosterior, DraftLengthPolicy, build_policy
from vllm_eesd.round.ngram import NgramDrafter
from vllm_eesd.simulate.peers import AdaptiveVerification, FixedLength, Oracle, fit_confidence, oracle
from vllm_eesd.simulate.replay import PolicyDrafter, replay
from vllm_eesd.simulate.run import load_traces, mix, parse_cost_scale, simulate
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace, RequestTrace, write

SMALL = synthetic_trace((0.3, 0.9), 0.7, num_requests=4, num_tokens=60)


class NoDrafts(FixedLength):
    def draft(self, batch, world):
        none = np.zeros_like(batch.limits)
        return none, none


def by_hand(matches, k):
    """Trace of one request whose every draft matches `matches` tokens; confidences say nothing."""
    length = 12
    request = RequestTrace(np.full(length, matches), np.full((length, k), 0.5, dtype=np.float32))
    return DenseTrace("m", "w", k, {}, [request])


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_every_drafter_emits_every_token(batch):
    for drafter in (FixedLength(), NoDrafts(), Oracle(0.3), *(
        PolicyDrafter(build_policy(name, BetaPosterior(batch), 0, {})) for name in POLICIES
    )):  # fmt: skip
        assert sum(replay(SMALL, drafter, World(), batch).tokens) == 4 * 60


def test_a_replay_by_hand():
    """12 tokens, 2 of 3 drafts accepted: 3 tokens a round, four rounds; the last may draft only 2."""
    world = World()
    result = replay(by_hand(matches=2, k=3), FixedLength(), world)
    assert result.tokens == [3, 3, 3, 3] and result.draft_lengths == [3, 3, 3, 2]
    full = world.verify_ms(1, 3) + world.draft_round_ms(1) + 3 * world.draft_step_ms(1)
    assert result.ms[:3] == pytest.approx([full] * 3)
    assert result.goodput_vs_plain == pytest.approx(12 * world.plain_ms(1) / sum(result.ms))


def test_the_default_world_is_the_one_stated():
    world = World()
    plain = world.plain_ms(1)
    for k in (1, 2, 4, 8):
        ms = world.verify_ms(1, k) + world.draft_round_ms(1) + k * world.draft_step_ms(1)
        assert ms / plain == pytest.approx(1.2 + 0.06 * k + 0.125 * k, abs=0.01)
    assert world.verify_ms(4, 16) / world.plain_ms(4) == pytest.approx(2.3, abs=0.05)


def test_no_drafts_is_plain_decoding():
    assert replay(SMALL, NoDrafts(), World(), 2).goodput_vs_plain == pytest.approx(1.0)


def test_cost_scales_multiply():
    ours, theirs = World(draft_scale=2.0, verify_scale=3.0), World()
    assert ours.draft_step_ms(4) == pytest.approx(2 * theirs.draft_step_ms(4))
    assert ours.draft_round_ms(4) == pytest.approx(2 * theirs.draft_round_ms(4))
    assert ours.plain_ms(4) == theirs.plain_ms(4)
    growth = theirs.verify_ms(4, 6) - theirs.plain_ms(4)
    assert ours.verify_ms(4, 6) == pytest.approx(theirs.plain_ms(4) + 3 * growth)


@pytest.mark.parametrize("batch", [1, 4])
def test_nobody_beats_the_oracle(batch):
    outcomes = {o.policy: o.replay.goodput_vs_plain for o in simulate("t", SMALL, list(POLICIES), batch)}
    assert max(outcomes, key=outcomes.get) == "oracle"


def test_the_oracle_wastes_no_draft():
    best = oracle(SMALL, World(), 1)
    assert sum(best.tokens) - len(best.tokens) == sum(best.draft_lengths)


def test_the_fitted_confidence_recovers_a_logistic_truth():
    generator = np.random.default_rng(0)
    shown = generator.random((6000, 1)).astype(np.float32)
    truth = lambda c: 1 / (1 + np.exp(-(-0.5 + 0.7 * np.log(c / (1 - c)))))  # noqa: E731
    accepted = (generator.random(shown.shape) < truth(shown)).astype(np.int64)[:, 0]
    fitted = fit_confidence(DenseTrace("m", "w", 1, {}, [RequestTrace(accepted, shown)]))
    grid = np.array([0.1, 0.5, 0.9])
    np.testing.assert_allclose(fitted(grid), truth(grid), atol=0.04)  # five standard errors of such a fit


def test_the_controller_drafts_all_and_verifies_what_is_worth_it():
    controller = AdaptiveVerification(lambda c: np.where(c > 0.5, 0.99, 0.01), 1, 4)
    confidences = np.tile(np.array([0.9, 0.9, 0.1, 0.9], dtype=np.float32), (40, 1))
    trace = DenseTrace("m", "w", 4, {}, [RequestTrace(np.full(40, 2), confidences)])
    lengths = []
    controller_draft = controller.draft
    controller.draft = lambda batch, world: lengths.append(controller_draft(batch, world)) or lengths[-1]
    replay(trace, controller, World())
    drafted, verified = zip(*lengths, strict=True)
    assert drafted[1].tolist() == [4] and verified[1].tolist() == [2]


def test_the_same_seed_replays_the_same():
    first, second = (simulate("t", SMALL, ["goodput", "beta_ts"], 2, seed=3) for _ in range(2))
    assert [o.row() for o in first] == [o.row() for o in second]
    assert [o.replay.ms for o in first] == [o.replay.ms for o in second]


def with_text(period, told=True, num_tokens=160, accepted=0):
    """A request the head is never right about, whose output repeats itself every so many tokens (0: never)."""
    emitted = np.arange(num_tokens) % period if period else np.arange(num_tokens)
    length, k = num_tokens - 8, 8
    text = {"prompt": np.array([900, 901]), "emitted": emitted + 1000} if told else {}
    request = RequestTrace(np.full(length, accepted), np.full((length, k), 0.3, dtype=np.float32), **text)
    return DenseTrace("m", "w", k, {}, [request] * 3)


class TakesEveryNgram(DraftLengthPolicy):
    """Takes every n-gram draft, and else drafts one token."""

    uses_ngrams = True

    def take_ngrams(self, slots, chances, limits):
        return np.where(chances[:, 1] > 0, np.minimum(limits, 8), 0)

    def more(self, slots, num_drafted, confidence):
        return np.full(len(slots), num_drafted == 0)


def test_a_copy_is_accepted_as_far_as_the_recorded_text_goes_on_so():
    """Output ABCD ABCX ABCD ..., prompt AB: what stood behind the longest match is copied, until the text differs."""
    emitted = np.array([3, 4, 1, 2, 3, 9, 1, 2, 3, 4, 1, 2, 3, 9, 1, 2], dtype=np.int32)
    request = RequestTrace(
        np.zeros(8, dtype=np.int64), np.zeros((8, 4), dtype=np.float32), np.array([1, 2], dtype=np.int32), emitted
    )
    world, policy = World(), TakesEveryNgram(BetaPosterior(1), 0)
    found = replay(DenseTrace("m", "w", 4, {}, [request]), PolicyDrafter(policy), world)
    # 1 2 3 and 1 2 3 4: nothing repeats, one draft each, rejected. 1 2 3 4 1: 2 3 are right, then 4 is not 9.
    # ... 2 3 9: nothing ended in 9 before, a draft. 9 1: copies 2 3 4 1 is cut to the last token but one.
    assert found.tokens == [1, 1, 3, 1, 2] and found.draft_lengths == [1, 1, 4, 1, 1]
    one_draft = world.verify_ms(1, 1) + world.draft_round_ms(1) + world.draft_step_ms(1)
    expected = [one_draft, one_draft, world.verify_ms(1, 4), one_draft, world.verify_ms(1, 1)]
    assert found.ms == pytest.approx(expected), "a copy costs its verification and no draft step"


@pytest.mark.parametrize("batch", [1, 3])
def test_goodput_gains_from_copies_where_the_text_repeats_itself(batch):
    def goodput(trace, **args):
        policy = build_policy("goodput", BetaPosterior(batch), 0, args)
        return replay(trace, PolicyDrafter(policy), World(), batch).goodput_vs_plain

    repeating = with_text(24)
    assert goodput(repeating) > 1.5 * goodput(repeating, ngram=False)
    assert goodput(repeating, ngram=False) == goodput(with_text(24, told=False))
    assert goodput(with_text(0)) == goodput(with_text(0), ngram=False), "there is nothing to copy"


def test_a_slot_forgets_the_request_that_ended(monkeypatch):
    forgotten, reset = [], NgramDrafter.reset
    monkeypatch.setattr(
        NgramDrafter, "reset", lambda self, slots: (forgotten.extend(slots.tolist()), reset(self, slots))
    )
    replay(with_text(24), PolicyDrafter(TakesEveryNgram(BetaPosterior(2), 0)), World(), 2)
    assert sorted(forgotten) in ([0, 0, 1], [0, 1, 1]), "three requests in two slots"


def test_requests_with_and_without_texts_may_be_mixed():
    mixed = mix([with_text(24), with_text(24, told=False)])
    policy = build_policy("goodput", BetaPosterior(2), 0, {})
    found = replay(mixed, PolicyDrafter(policy), World(), 2)
    assert sum(found.tokens) == 6 * 152 and found.goodput_vs_plain > 1.2


def test_a_mixture_takes_requests_in_turn():
    a, b = (synthetic_trace((rate,), 0.5, num_requests=n, num_tokens=5) for rate, n in ((0.1, 1), (0.9, 3)))
    mixed = mix([a, b]).requests
    assert [any(request is other for other in a.requests) for request in mixed] == [True, False, False, False]


@pytest.fixture
def files(tmp_path):
    paths = []
    for name, rate in (("hard", 0.2), ("easy", 0.9)):
        paths.append(str(tmp_path / f"{name}.jsonl.gz"))
        write(paths[-1], synthetic_trace((rate,), 0.7, num_requests=3, num_tokens=40))
    return paths


def test_the_command_writes_rows_and_a_picture(files, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    rows, picture = tmp_path / "rows.json", tmp_path / "p.png"
    argv = ["simulate", *files, "--policies", "goodput,fixed", "--batch", "2", "--cost-scale", "draft=0.5"]
    assert cli.main([*argv, "--json", str(rows), "--plot", str(picture)]) == 0
    found = json.loads(rows.read_text())
    assert {row["trace"] for row in found} == {"hard", "easy", "mixed"}
    for trace in ("hard", "easy", "mixed"):
        policies = [row["policy"] for row in found if row["trace"] == trace]
        assert policies == ["oracle", "best_fixed", "vllm_adaptive", "goodput", "fixed"]
    assert all({"goodput_vs_plain", "mean_draft_length"} <= set(row) for row in found)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "goodput" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--policies", "goodput,best"], "'best'"),
        (["--cost-scale", "draft"], "'draft'"),
        (["--cost-scale", "plain=2"], "'plain=2'"),
        (["--cost-scale", "verify=-1"], "'verify=-1'"),
    ],
)
def test_mistakes_are_one_line(files, extra, named, capsys):
    assert cli.main(["simulate", *files, *extra]) == cli.USER_ERROR
    message = capsys.readouterr().err
    assert named in message and message.count("\n") == 1


def test_traces_that_do_not_go_together_are_refused(files, tmp_path):
    with pytest.raises(ValueError, match="two traces would be called 'hard'"):
        load_traces([files[0], files[0]])
    write(tmp_path / "short.jsonl", by_hand(1, 3))
    with pytest.raises(ValueError, match="num_speculative_tokens differs"):
        load_traces([files[0], str(tmp_path / "short.jsonl")])
    write(tmp_path / "empty.jsonl", DenseTrace("m", "w", 3, {}, []))
    with pytest.raises(ValueError, match="no emitted position"):
        load_traces([str(tmp_path / "empty.jsonl")])


def test_cost_scales_are_parsed():
    assert parse_cost_scale(None) == {"draft_scale": 1.0, "verify_scale": 1.0}
    assert parse_cost_scale("draft=0.5, verify=2") == {"draft_scale": 0.5, "verify_scale": 2.0}
