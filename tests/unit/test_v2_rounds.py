"""Model Runner V2's host side without an engine: what is learned late is learned of the right round and request."""

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_eesd.config import EESDConfig
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Verifier
from vllm_eesd.host import round_setup
from vllm_eesd.host.v2 import drawing, lengths, readback, trace
from vllm_eesd.host.v2.batch import TargetStep
from vllm_eesd.host.v2.lengths import SHARE_TIMES_EVERY, Rounds
from vllm_eesd.policy.costs import MIN_SAMPLES
from vllm_eesd.policy.guard import Guard
from vllm_eesd.round import outcome
from vllm_eesd.round.idle import MAY_NOT_DRAFT
from vllm_eesd.round.outcome import READBACK_DELAY
from vllm_eesd.traces.rounds import Judged

K = 4
ALWAYS = {"policy": "confidence", "policy_args": {"threshold": 0.5}}


@pytest.fixture(autouse=True)
def steady_clock(monkeypatch):
    """A millisecond passes between two looks at the clock: no policy learns how busy the machine is."""
    moments = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(moments) / 1e3)
    for module in (lengths, outcome, readback):
        monkeypatch.setattr(module, "time", clock)


def make_rounds(monkeypatch, world_size=1, max_model_len=100, **eesd):
    group = SimpleNamespace(world_size=world_size, broadcast_object=lambda measured, src: measured)
    monkeypatch.setattr(round_setup, "get_tp_group", lambda: group)
    verifier = Verifier(
        name_or_path="t", architecture="LlamaForCausalLM", hidden_size=64, num_hidden_layers=8, vocab_size=512
    )
    head = ExitHeadConfig(exit_layer=2, head_type="headless", verifier=verifier)
    config = SimpleNamespace(
        eesd=EESDConfig(num_speculative_tokens=K, **eesd),
        exit_head=head,
        head_directory=None,
        num_speculative_tokens=K,
        engine_index=0,
    )
    return Rounds(config, max_num_reqs=3, max_model_len=max_model_len, device=torch.device("cpu"))


def new_request(max_tokens=50, structured_outputs=None, temperature=0.0, seed=None, **extra_args):
    params = SimpleNamespace(
        extra_args=extra_args,
        max_tokens=max_tokens,
        temperature=temperature,
        stop_token_ids=None,
        ignore_eos=False,
        eos_token_id=None,
        logprob_token_ids=None,
        seed=seed,
        presence_penalty=0,
        frequency_penalty=0,
        repetition_penalty=1.0,
        logit_bias=None,
        bad_words=None,
        allowed_token_ids=None,
        structured_outputs=structured_outputs,
    )
    prompt = {"prompt_token_ids": [1] * 10, "prefill_token_ids": [1] * 10}
    return SimpleNamespace(sampling_params=params, lora_request=None, prompt_len=10, **prompt)


def target_step(slots, num_sampled, scheduled=None, prefilling=False, computed=10, tokens=1):
    num_reqs = len(slots)
    drafts = None if scheduled is None else np.array(scheduled)
    rows = SimpleNamespace(
        idx_mapping_np=np.array(slots),
        num_draft_tokens_per_req=drafts,
        num_scheduled_tokens=np.full(num_reqs, tokens) + (0 if drafts is None else drafts),
        is_prefilling_np=np.full(num_reqs, prefilling),
        num_computed_prefill_tokens_np=np.full(num_reqs, computed),
        prefill_len_np=np.full(num_reqs, 10),
        num_tokens=num_reqs,
    )
    return TargetStep(rows, None, torch.tensor(num_sampled, dtype=torch.int32), None, None)


def begin(rounds, slots, num_sampled, **kwargs):
    return begin_step(rounds, target_step(slots, num_sampled, **kwargs))


def begin_step(rounds, step, asynchronous=True, tokens=None, longest=None):
    return rounds.begin(step, asynchronous, step.num_sampled[:, None], tokens, longest)


def draft(rounds, confidences):
    """Run a round's steps, of these confidences; returns the lengths and the number of steps."""
    rounds.end(torch.from_numpy(confidences.copy()))
    return rounds.round.lengths.tolist(), rounds.round.num_steps


def test_a_round_is_decided_ahead_by_the_last_confidences_known(monkeypatch):
    """Of an unknown token a threshold says no, so drafts grow by one token each time a round's outcome is read."""
    rounds = make_rounds(monkeypatch, **ALWAYS)
    rounds.admit([0, 1], [new_request(), new_request()])
    confidences = np.array([[0.9, 0.1, 0.9, 0.9], [0.2, 0.9, 0.9, 0.9]], dtype=np.float32)
    begin(rounds, [0, 1], [1, 1])
    decided = [draft(rounds, confidences)]
    for _ in range(3 * READBACK_DELAY):
        begin(rounds, [0, 1], [1, 1], scheduled=[K, K])
        decided.append(draft(rounds, confidences))
    # Row 0 ends with the token of confidence 0.1, row 1 with its first.
    first, later = [([1, 1], 1)], [([2, 1], 2)]
    assert decided == first * (READBACK_DELAY + 1) + later * (2 * READBACK_DELAY)
    assert rounds.num_drafted[:2].tolist() == [2, 1]


def test_goodput_is_asked_ahead_without_confidences(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="goodput")
    told = []
    more = rounds.policy.more
    monkeypatch.setattr(rounds.policy, "more", lambda s, n, confidence: told.append(confidence) or more(s, n, None))
    rounds.admit([0, 1], [new_request(), new_request()])
    for _ in range(READBACK_DELAY + 3):
        begin(rounds, [0, 1], [1, 1], scheduled=[K, K])
        draft(rounds, np.full((2, K), 0.9, dtype=np.float32))
    assert told and all(confidence is None for confidence in told)
    assert rounds.policy.costs.all_rows_draft


def test_outcomes_meet_the_confidences_of_their_own_round(monkeypatch):
    rounds = make_rounds(monkeypatch, **ALWAYS)
    observed, drafted = [], []
    monkeypatch.setattr(rounds.policy.calibration, "observe", lambda c, v, a, *_: observed.append((c[0, :3], v, a)))
    rounds.admit([1], [new_request()])
    begin(rounds, [1], [1], prefilling=True, computed=0, tokens=10)
    for number in range(1, 3 * READBACK_DELAY):
        column = np.array([[0.6 + number / 100, 0.1, 0.9, 0.9]], dtype=np.float32)
        drafted.append(draft(rounds, column)[0][0])
        begin(rounds, [1], [2], scheduled=[K])
    assert len(observed) == len(drafted) - READBACK_DELAY and drafted[-1] == 2
    for number, (confidences, verified, accepted) in enumerate(observed, 1):
        second = 0.1 if drafted[number - 1] == 2 else np.nan
        np.testing.assert_allclose(confidences, [0.6 + number / 100, second, np.nan], rtol=1e-6)
        assert (verified.tolist(), accepted.tolist()) == ([drafted[number - 1]], [1])


def test_a_slot_that_changed_hands_teaches_its_new_request_nothing(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="beta_ts")
    rounds.admit([2], [new_request()])
    begin(rounds, [2], [1])
    for _ in range(READBACK_DELAY):
        begin(rounds, [2], [1], scheduled=[K])
    rounds.admit([2], [new_request()])
    before = rounds.policy.posterior.parameters(np.array([2])).tolist()
    for _ in range(READBACK_DELAY):
        begin(rounds, [2], [1], prefilling=True, computed=0, tokens=10)
    assert rounds.policy.posterior.parameters(np.array([2])).tolist() == before


def test_nobody_drafts_past_its_budget_or_inside_its_prompt(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="fixed")
    requests = [new_request(max_tokens=4), new_request(), new_request(eesd_max_draft_tokens=1)]
    rounds.admit([0, 1, 2], requests)
    begin(rounds, [0, 1, 2], [1, 1, 1], prefilling=True, computed=0, tokens=10)
    # Of four tokens one is out at the end of the prompt, though not counted yet: three fit, and the bonus token.
    assert rounds.round.lengths.tolist() == [3, K, 1]
    begin(rounds, [0, 1, 2], [0, 0, 0], prefilling=True, computed=0, tokens=5)
    assert rounds.round.lengths.tolist() == [0, 0, 0]
    assert rounds.round.num_steps == 0


def test_vllm_may_ask_for_shorter_drafts_and_for_none(monkeypatch):
    """With none the round before is learned from all the same."""
    rounds = make_rounds(monkeypatch, policy="fixed")
    rounds.admit([0, 1], [new_request(), new_request(eesd_max_draft_tokens=1)])
    begin_step(rounds, target_step([0, 1], [1, 1]), longest=2)
    assert rounds.round.lengths.tolist() == [2, 1]
    for _ in range(READBACK_DELAY + 1):
        begin_step(rounds, target_step([0, 1], [1, 1], scheduled=[K, K]), longest=0)
        assert rounds.round.lengths.tolist() == rounds.num_drafted[:2].tolist() == [0, 0]
        assert rounds.round.num_steps == 0
    assert rounds.stats.draft_length_histogram == [2, 1, 1, 0, 0]  # a plain round, and the drafts of two and one


@pytest.mark.parametrize(("asynchronous", "failures"), [(True, 0), (False, 1)])
def test_drafts_a_grammar_cut_are_unobserved(monkeypatch, asynchronous, failures):
    rounds = make_rounds(monkeypatch, policy="fixed")
    rounds.admit([0], [new_request(structured_outputs=object())])
    before = rounds.policy.posterior.parameters(np.array([0]))[1]
    for _ in range(READBACK_DELAY + 2):
        begin_step(rounds, target_step([0], [1], scheduled=[K]), asynchronous)
        last = rounds.policy.posterior.parameters(np.array([0]))[1]
    assert (last - before).tolist() == [failures]


def test_after_a_fault_nobody_has_a_draft_and_everybody_is_admitted_anew(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="fixed")
    slots = np.array([0, 2])
    rounds.admit([0, 2], [new_request(), new_request(eesd_max_draft_tokens=1)])
    prior = rounds.policy.posterior.parameters(slots).tolist()
    for _ in range(READBACK_DELAY + 2):
        begin(rounds, [0, 2], [1, 1], scheduled=[K, K])
    assert rounds.policy.posterior.parameters(slots).tolist() != prior
    with monkeypatch.context() as patch:
        patch.setattr(rounds.policy, "begin", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            begin(rounds, [0, 2], [1, 1], scheduled=[K, K])
    rounds.start_afresh()
    assert rounds.num_drafted.tolist() == [0, 0, 0]
    begin(rounds, [0, 2], [1, 1], scheduled=[K, K])
    assert rounds.policy.posterior.parameters(slots).tolist() == prior  # what was under way is dropped
    assert rounds.round.lengths.tolist() == [K, 1]
    for _ in range(READBACK_DELAY + 1):  # the first step verified nothing
        begin(rounds, [0, 2], [1, 1], scheduled=[K, K])
    assert rounds.policy.posterior.parameters(slots).tolist() != prior


def test_a_request_that_could_not_be_admitted_is_admitted_with_its_first_round(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="fixed")
    with monkeypatch.context() as patch:
        patch.setattr(rounds.policy, "reset", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rounds.admit([1], [new_request(eesd_max_draft_tokens=2)])
    rounds.start_afresh()
    begin(rounds, [1], [1])
    assert rounds.round.lengths.tolist() == [2]


def test_warming_up_teaches_nothing(monkeypatch):
    """vLLM warms up with requests of its own making, whose steps wait for compilers."""
    rounds = make_rounds(monkeypatch, policy="fixed")
    rounds.learns = False
    rounds.admit([1], [new_request()])
    before, costs = rounds.policy.posterior.parameters(np.array([1])).tolist(), rounds.policy.costs.state()
    for _ in range(READBACK_DELAY + 3):
        begin(rounds, [1], [2], scheduled=[K])
    assert rounds.policy.posterior.parameters(np.array([1])).tolist() == before
    assert rounds.policy.costs.state() == costs and rounds.stats.rounds == 0
    rounds.learns = True
    begin(rounds, [1], [2], scheduled=[K])
    assert rounds.stats.rounds == 1 and rounds.policy.costs.state() != costs


def test_warming_up_earns_no_credit(monkeypatch):
    """Each new request brings the guard an allowance; those of made-up ones would pay for many losing rounds."""
    brought = []
    monkeypatch.setattr(Guard, "admit", lambda guard, num_reqs: brought.append((guard, num_reqs)))
    rounds = make_rounds(monkeypatch, policy="goodput")
    rounds.learns = False
    rounds.admit([0, 1, 2], [new_request(), new_request(), new_request()])
    begin(rounds, [0, 1, 2], [1, 1, 1])
    rounds.forget_requests()
    rounds.learns = True
    warm = {guard for guard, _ in brought}
    brought.clear()
    begin(rounds, [], [])
    rounds.admit([1], [new_request()])
    rounds.start_afresh()  # as after a fault
    begin(rounds, [1], [1])
    assert [num_reqs for _, num_reqs in brought] == [1, 1]
    assert not warm & {guard for guard, _ in brought}


def test_every_step_is_timed_whatever_the_number_of_ranks(monkeypatch):
    """With several ranks times are exchanged once in 16 steps; what they add up to is each step's."""
    totals = []
    for world_size in (1, 2):
        moments = itertools.count()
        monkeypatch.setattr(
            readback, "time", SimpleNamespace(perf_counter=lambda moments=moments: float(next(moments)))
        )
        rounds = make_rounds(monkeypatch, world_size, policy="fixed")
        rounds.admit([1], [new_request()])
        for _ in range(2 * SHARE_TIMES_EVERY + READBACK_DELAY):
            begin(rounds, [1], [1], scheduled=[K])
        assert rounds.policy.costs.state()["verify_ms"]
        totals.append(rounds.stats.decode_ms)
    # 1 s a step, but for the first, and for those before times of this batch size can be trusted.
    assert totals[0] == totals[1] == (2 * SHARE_TIMES_EVERY - MIN_SAMPLES) * 1e3


def test_a_state_file_that_cannot_be_written_is_told_once(monkeypatch):
    warnings = []
    monkeypatch.setattr(outcome, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(outcome, "logger", SimpleNamespace(warning=lambda *args: warnings.append(args)))
    rounds = make_rounds(monkeypatch, policy="fixed")

    def refuse():
        raise OSError("read-only")

    for save, num_told in ((refuse, 1), (refuse, 1), (lambda: None, 1), (refuse, 2)):
        monkeypatch.setattr(rounds.policy, "save_state", save)
        begin(rounds, [], [])
        assert len(warnings) == num_told


@pytest.mark.parametrize("policy", ["fixed", "beta_ts", "goodput"])
def test_drafts_of_hidden_states_that_are_not_finite_are_counted_late(monkeypatch, policy):
    """Whether the policy looks at confidences or not; what lies behind a draft's end is not one of its tokens."""
    rounds = make_rounds(monkeypatch, policy=policy)
    rounds.admit([0, 2], [new_request(), new_request(eesd_max_draft_tokens=1)])
    counted, expected = [], []
    for number in range(READBACK_DELAY + 4):
        begin(rounds, [2, 0], [1, 1], scheduled=[K, K])
        counted.append(rounds.stats.not_finite)
        draft(rounds, np.full((2, K), 0.9, dtype=np.float32))
        drafted = np.arange(K) < rounds.round.lengths[:, None]
        finite = drafted if number else np.zeros_like(drafted)  # in the first round nothing is
        expected.append(int((drafted & ~finite).sum()))
        rounds.end(torch.from_numpy(np.where(finite, np.float32(0.9), np.float32(np.nan))))  # in place of the others
    assert expected[0] > 0
    assert counted == [0] * (READBACK_DELAY + 1) + [expected[0]] * 3


def test_confidences_of_every_draft_step_are_learned_from(monkeypatch):
    """Every row runs every step: what a row drafted past its own end tells of the next round's tokens."""
    rounds = make_rounds(monkeypatch, **ALWAYS)
    observed = []
    monkeypatch.setattr(rounds.policy.calibration, "observe", lambda c, v, a, *_: observed.append(c[:, : K + 1]))
    rounds.admit([0, 1], [new_request(), new_request()])
    columns = np.array([[0.9, 0.8, 0.7, 0.6], [0.9, 0.1, 0.3, 0.2]], dtype=np.float32)
    for _ in range((K + 1) * (READBACK_DELAY + 1)):
        begin(rounds, [0, 1], [1, 1], scheduled=[K, K])
        lengths, num_steps = draft(rounds, columns)
    assert (lengths, num_steps) == ([K, 2], K)
    np.testing.assert_allclose(observed[-1], np.pad(columns, ((0, 0), (0, 1)), constant_values=np.nan))


def test_confidences_of_another_request_in_the_same_slot_are_not_taken(monkeypatch):
    rounds = make_rounds(monkeypatch, **ALWAYS)
    observed = []
    monkeypatch.setattr(rounds.policy.calibration, "observe", lambda c, v, a, *_: observed.append(c[0, :K]))
    columns = np.full((1, K), 0.9, dtype=np.float32)
    rounds.admit([1], [new_request()])
    begin(rounds, [1], [1])
    draft(rounds, columns)
    rounds.admit([1], [new_request()])
    rounds.num_drafted[1] = K  # as if the new request were verified at once
    for _ in range(READBACK_DELAY + 1):
        begin(rounds, [1], [1], scheduled=[K])
    assert np.isnan(observed[0]).all()


def test_a_sequence_limit_that_vllm_shortens_after_the_start_is_heeded(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="fixed")
    rounds.max_model_len = 14  # ten of the prompt, the token just sampled, two drafts and the token after them
    rounds.admit([0], [new_request()])
    begin(rounds, [0], [0])
    assert rounds.round.lengths.tolist() == [2]


def test_a_traced_round_is_what_the_target_judged(monkeypatch):
    """Tokens come from the device; a grammar's cuts are unknown there, so only what was accepted is told."""
    rounds = make_rounds(monkeypatch, policy="fixed")
    noted = []
    rounds.round_trace = SimpleNamespace(add_pending=lambda *args: noted.append(args))
    rounds.admit([0, 1, 2], [new_request(), new_request(structured_outputs=object()), new_request()])

    def run(prefilling, scheduled):
        drafts = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]])
        step = target_step([0, 1, 2], [3, 2, 5], scheduled)
        step.last_sampled = torch.tensor([[19], [29], [39]])
        step._batch.is_prefilling_np, step._batch.req_ids = np.array(prefilling), ["a", "b", "c"]
        step._batch.idx_mapping = torch.arange(3)
        begin_step(rounds, step, tokens=trace.tokens_of_step(step, drafts)).mark()

    run([False] * 3, [K] * 3)  # nothing is known of the time before it
    assert not noted
    run([False, False, True], [K, K, 0])
    ((drafts, policy, _, num_reqs, verdict),) = noted
    assert (drafts.slots.tolist(), policy, num_reqs) == ([0, 1, 2], rounds.policy, 2)
    known = verdict()
    assert known.judged == [Judged("a", [11, 12, 13, 14], [11, 12, 19]), Judged("b", [21], [21, 29])]
    assert known.rows.tolist() == [0, 1] and known.verify_ms > 0 and known.draft_steps_ms == []


def test_a_traced_round_shows_the_confidences_of_its_own_drafts(monkeypatch):
    """They are known with the verdict only, and rows are found by their slots: batches change from step to step."""
    rounds = make_rounds(monkeypatch, **ALWAYS)
    noted = []
    rounds.round_trace = SimpleNamespace(add_pending=lambda *args: noted.append(args))
    rounds.admit([0, 2], [new_request(), new_request()])

    def run(slots):
        step = target_step(slots, [1] * len(slots), [K] * len(slots))
        step.last_sampled = torch.full((3, 1), 19)
        step._batch.req_ids, step._batch.idx_mapping = [str(slot) for slot in slots], torch.tensor(slots)
        drafts = torch.ones(len(slots), K, dtype=torch.int64)
        begin_step(rounds, step, tokens=trace.tokens_of_step(step, drafts)).mark()

    run([0, 2])
    draft(rounds, np.array([[0.25, 0, 0, 0], [0.75, 0, 0, 0]], dtype=np.float32))
    run([2, 0])
    assert noted[-1][-1]().confidences[:, 0].tolist() == [0.75, 0.25]
    run([2])  # nothing was drafted for it
    assert noted[-1][-1]().confidences is None


def begin_with_ngrams(rounds, slots, counts, **kwargs):
    step = target_step(slots, [row[0] for row in counts], **kwargs)
    return rounds.begin(step, True, torch.tensor(counts, dtype=torch.int32))


def test_ngram_drafts_are_taken_by_how_far_the_text_matched_when_last_known(monkeypatch):
    """Slot 1 goes on as it did before, slot 0 does not: one copies and the other drafts, or nobody does."""
    rounds = make_rounds(monkeypatch, policy="goodput")
    verify_curve = lambda self, num_reqs, most: 1 + 0.05 * np.arange(most + 1)  # noqa: E731
    monkeypatch.setattr(type(rounds.policy.costs), "verify_curve", verify_curve)
    monkeypatch.setattr(outcome.Learner, "learn_times", lambda self, times: None)
    monkeypatch.setattr(rounds.policy.guard, "may_draft", lambda: True)  # no draft is accepted here, which it bounds
    rounds.admit([0, 1], [new_request(max_tokens=80), new_request(max_tokens=80)])
    taken = []
    for _ in range(2 * READBACK_DELAY + 5):
        begin_with_ngrams(rounds, [0, 1], [[1, 0, 0], [1, 1, 16]], scheduled=[K, K])
        rounds.end(torch.full((2, K), 0.5))
        taken.append(rounds.round.from_ngrams.tolist())
    assert taken[:READBACK_DELAY] == [[False, False]] * READBACK_DELAY
    assert taken[-1] == [False, True] and rounds.num_drafted[1] > 0
    assert rounds.round.num_steps == rounds.round.lengths[0]
    assert rounds.stats.as_dict()["copied"] > 0


def test_ngram_drafts_teach_nothing_about_the_exit_head(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="goodput")
    monkeypatch.setattr(rounds.policy, "take_ngrams", lambda slots, chances, limits: limits)
    rounds.admit([0], [new_request(max_tokens=80)])
    before = rounds.policy.posterior.parameters(np.array([0])).tolist()
    for _ in range(READBACK_DELAY + 4):
        begin_with_ngrams(rounds, [0], [[3, 2, 4]], scheduled=[K])
        assert rounds.round.num_steps == 0 and rounds.num_drafted[0] == K
    assert rounds.policy.posterior.parameters(np.array([0])).tolist() == before
    judged = 4 + READBACK_DELAY - READBACK_DELAY - 1  # of the steps that are read, all but the first
    stats = rounds.stats.as_dict()
    assert (stats["copied"], stats["copied_accepted"]) == (K * judged, 2 * judged)


GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8}
SEEDED, BOUND = SAMPLED | {"seed": 3}, SAMPLED | {"structured_outputs": object()}


@pytest.mark.parametrize(
    ("requests", "method", "kind", "certain"),
    [
        ([GREEDY, GREEDY], "auto", drawing.GREEDY, [False, False]),
        ([GREEDY, SAMPLED], "auto", drawing.DRAWN, [False, False]),
        ([BOUND, SAMPLED], "auto", drawing.DRAWN, [True, False]),
        ([GREEDY, BOUND], "auto", drawing.GREEDY, [False, True]),
        ([SEEDED, GREEDY], "auto", drawing.SHARED_NOISE, [False, False]),
        ([SAMPLED, BOUND | SEEDED], "auto", drawing.SHARED_NOISE, [False, False]),
        ([SEEDED, GREEDY], "greedy", drawing.GREEDY, [False, False]),
        ([SAMPLED, BOUND], "greedy", drawing.GREEDY, [False, False]),
    ],
)
def test_drafts_are_drawn_for_requests_that_sample_freely(monkeypatch, requests, method, kind, certain):
    rounds = make_rounds(monkeypatch, policy="fixed", draft_sample_method=method)
    rounds.admit([0, 1], [new_request(**request) for request in requests])
    begin(rounds, [0, 1], [1, 1])
    assert rounds.round.num_steps and rounds.num_drafted[[0, 1]].all()
    assert (rounds.drawing.kind(rounds.round), rounds.drawing.certain(rounds.round).tolist()) == (kind, certain)


@pytest.mark.parametrize("unseeded", ["ratio", "shared_noise"])
@pytest.mark.parametrize("has_margins", [True, False])
def test_the_policy_is_told_the_kind_of_every_requests_drafts(monkeypatch, has_margins, unseeded):
    """A request under a grammar drafts greedily, unless it shares its noise."""
    rounds = make_rounds(monkeypatch, policy="fixed", unseeded_verification=unseeded)
    rounds.drawing.has_margins = has_margins
    rounds.admit([0, 1, 2], [new_request(**request) for request in (SAMPLED, SEEDED, BOUND)])
    shared, seeded_only = drawing.SHARED_NOISE if has_margins else drawing.DRAWN, unseeded == "ratio"
    expected = [drawing.DRAWN, shared, drawing.GREEDY] if seeded_only else [shared] * 3
    assert rounds.policy.kinds[[0, 1, 2]].tolist() == expected
    rounds.admit([1], [new_request(**GREEDY, seed=1)])
    assert rounds.policy.kinds[1] == drawing.GREEDY


def test_a_request_without_a_draft_of_the_exit_head_draws_none(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="fixed")
    rounds.admit([0, 1], [new_request(temperature=0.8), new_request(temperature=0.0)])
    rounds._has_adapter[0] = True
    begin(rounds, [0, 1], [1, 1])
    assert rounds.num_drafted[[0, 1]].tolist() == [0, K] and rounds.drawing.kind(rounds.round) == drawing.GREEDY


def a_round(rounds, slots, num_tokens=None, **kwargs):
    """A step of these slots that emitted a token each, and the round after it; returns whether it was skipped."""
    step = target_step(slots, [1] * len(slots), **kwargs)
    step._batch.num_tokens = num_tokens or len(slots)
    step._batch.req_ids, step._batch.num_reqs = [str(slot) for slot in slots], len(slots)
    if rounds.skips(step):
        return True
    begin_step(rounds, step)
    rounds.back_off(step, decision_ms=3.0)
    return False


def test_requests_that_may_not_draft_are_asked_once_in_a_while(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="fixed")
    requests = [new_request(eesd_enabled=False), new_request(eesd_enabled=False)]
    rounds.admit([0, 1], requests)
    rounds.learns = False
    assert not any(a_round(rounds, [0, 1]) for _ in range(3))  # while the worker warms up
    rounds.learns = True
    rounds.forget_requests()
    rounds.admit([0, 1], requests)
    assert [a_round(rounds, [0, 1]) for _ in range(MAY_NOT_DRAFT + 2)] == [False, *[True] * MAY_NOT_DRAFT, False]
    assert rounds.stats.rounds == 2 * (MAY_NOT_DRAFT + 1)  # the last step's outcome is read later
    assert rounds._num_tokens[:2].tolist() == [10 + MAY_NOT_DRAFT + 2] * 2
    for other in ({"slots": [0]}, {"slots": [0, 1], "prefilling": True}, {"slots": [0, 1], "num_tokens": 5}):
        assert a_round(rounds, [0, 1]) or a_round(rounds, [0, 1])
        assert not a_round(rounds, **other)
    rounds.start_afresh()  # as after a fault
    assert not a_round(rounds, [0, 1])


def test_a_prompt_of_embeddings_counts_in_its_budget(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="fixed")
    embedded = new_request(max_tokens=3)
    embedded.prompt_token_ids = None
    rounds.admit([0, 1], [embedded, new_request(max_tokens=3)])
    begin(rounds, [0, 1], [1, 1])
    assert rounds.round.lengths.tolist() == [1, 1]


def test_rounds_that_are_watched_are_not_skipped(monkeypatch):
    rounds = make_rounds(monkeypatch, policy="fixed")
    rounds.stats.take_rounds()
    rounds.admit([0], [new_request(eesd_enabled=False)])
    assert not any(a_round(rounds, [0]) for _ in range(4))


def test_goodput_rests_where_drafting_does_not_pay_and_plain_steps_stay_timed(monkeypatch):
    """Nothing is skipped with a draft in the batch; a decision as dear as ten plain steps is made once in a while."""
    rounds = make_rounds(monkeypatch, policy="goodput")
    skipped, told, times = [], [], []
    monkeypatch.setattr(rounds.policy, "more", lambda slots, *_: np.zeros(len(slots), dtype=bool))
    monkeypatch.setattr(rounds.policy, "take_ngrams", lambda slots, chances, limits: 0 * limits)
    monkeypatch.setattr(rounds.policy, "idle_rounds", lambda slots: 5)
    monkeypatch.setattr(rounds.policy, "skipped", lambda slots, num_rounds: skipped.append((len(slots), num_rounds)))
    monkeypatch.setattr(rounds.policy.costs, "observe_decision", lambda *decision: told.append(decision))
    learn_times = rounds.session.learner.learn_times
    monkeypatch.setattr(rounds.session.learner, "learn_times", lambda step: times.append(step) or learn_times(step))
    rounds.admit([0, 2], [new_request(), new_request()])
    assert [a_round(rounds, [0, 2]) for _ in range(13)] == 2 * [False, *[True] * 5] + [False]
    assert skipped == [(2, 5)] * 2
    for _ in range(6 * READBACK_DELAY):
        a_round(rounds, [0, 2])
    assert set(told) == {(2, 3.0)}
    assert [step.num_skipped for step in times[:3]] == [0, 5, 5]
    assert all(step.verify_ms > 0 for step in times[1:])


def test_an_ngram_draft_from_before_rounds_without_a_search_is_not_judged(monkeypatch):
    """The device compares the draft it has with what the last step emitted; the draft continued an older text."""
    rounds = make_rounds(monkeypatch, policy="goodput")
    monkeypatch.setattr(rounds.policy, "more", lambda slots, *_: np.zeros(len(slots), dtype=bool))
    monkeypatch.setattr(rounds.policy, "take_ngrams", lambda slots, chances, limits: 0 * limits)
    monkeypatch.setattr(rounds.policy, "idle_rounds", lambda slots: 5)
    rounds.admit([0], [new_request(max_tokens=80)])
    judged = []
    monkeypatch.setattr(rounds.session.ngrams, "learn", lambda slots, *rest: judged.append(slots.tolist()))
    for _ in range(6 * (READBACK_DELAY + 3)):
        step = target_step([0], [1])
        step._batch.req_ids, step._batch.num_reqs = ["a"], 1
        if not rounds.skips(step):
            rounds.begin(step, True, torch.tensor([[1, 1, 4]], dtype=torch.int32))
            rounds.back_off(step, 3.0)
    assert judged[1:] and judged == [[0], *[[]] * (len(judged) - 1)]


def test_a_text_longer_than_noise_tells_apart_is_refused(monkeypatch):
    longest = {"max_model_len": 1 << 24}
    make_rounds(monkeypatch, **longest)
    longest["max_model_len"] += 1
    with pytest.raises(ValueError, match=r"max_model_len=16777217 .* allowed: at most 16777216, or .*greedy"):
        make_rounds(monkeypatch, **longest)
    make_rounds(monkeypatch, **longest, draft_sample_method="greedy")


class Stream:
    """Stands in for a CUDA stream and its events: notes in `log` what it is asked to do, in order."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch):
    """What the host asks of two streams; the one that computes is current but within `torch.cuda.stream`."""
    log = []
    current = [Stream("compute", log)]

    @contextlib.contextmanager
    def within(stream):
        current.append(stream)
        yield
        current.pop()

    def event(blocking):
        assert blocking
        return SimpleNamespace(record=lambda: log.append(f"event on {current[-1].name}"))

    copy = torch.Tensor.copy_

    def noted(target, source, non_blocking=False):
        log.append(f"{current[-1].name} copies, non_blocking={non_blocking}")
        return copy(target, source)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies", log))
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: log.append(f"kept for {stream.name}"))
    return log


def test_values_travel_beside_the_computation(streams):
    """What is computed is copied on another stream, and is not written again before: no stream but those waits."""
    to_host = readback.CopyStream(torch.device("cuda"))
    confidences = to_host.copy(torch.ones(2))
    to_host.before_writing()
    assert streams == [
        "copies waits for compute",
        "copies copies, non_blocking=True",
        "event on copies",
        "kept for copies",
        "compute waits for copies",
    ]
    assert confidences._copy.tolist() == [1, 1]


def test_a_round_writes_confidences_behind_their_copy(streams, monkeypatch):
    rounds = make_rounds(monkeypatch, **ALWAYS)
    rounds._to_host = readback.CopyStream(torch.device("cuda"))
    rounds.admit([0], [new_request()])
    begin(rounds, [0], [1])
    rounds.end(torch.ones(1, K))
    copies = streams.count("copies copies, non_blocking=True")
    assert copies == 2  # of the counts and of the confidences
    streams.clear()
    begin(rounds, [0], [1])
    assert streams[0] == "compute waits for copies"
