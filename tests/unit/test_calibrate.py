"""`eesd calibrate`: its rounds are those of real drafting, its table and prior are right, its file is read back."""

from __future__ import annotations

import json
from argparse import Namespace

import numpy as np
import pytest
import torch

from vllm_eesd.distill import calibrate
from vllm_eesd.distill.calibrate import (
    DRAWN_TEMPERATURE,
    Rounds,
    calibration_errors,
    count,
    count_sampled,
    draft_rounds,
    fit_prior,
    noise_of,
    run,
)
from vllm_eesd.distill.generate import own_held_out
from vllm_eesd.distill.model import head_config, load_head, new_head
from vllm_eesd.distill.target import load_target
from vllm_eesd.distill.vocabulary import restrict
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Prior, write_head
from vllm_eesd.policy import Calibration

VOCAB, LAYERS, SEQ_LEN, DEPTH = 64, 4, 32, 8
# Two tokens of three.
PRUNED = torch.tensor([token_id for token_id in range(VOCAB) if token_id % 3 != 1])
# Two float32 forward passes of different lengths.
FLOAT32_TOLERANCE = 1e-5


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["headless", "transformer", "deep_context", "transformer, pruned"])
def head_dir(request, model_dir, tmp_path):
    """A head somewhat like the target's layers 2 and 3, so that some drafts are accepted."""
    target = load_target(str(model_dir), 3, "cpu")
    head_type, *pruned = request.param.split(", ")
    head = new_head(target, "last", head_type)
    torch.manual_seed(1)
    for parameter in head.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    if pruned:
        restrict(head, PRUNED)
    config = head_config(target, str(model_dir), head_type, Prior(), len(PRUNED) if pruned else None)
    write_head(tmp_path / "head", config, head.state_dict())
    return tmp_path / "head"


@torch.no_grad()
def draft_token_by_token(target, head, prefix):
    """Return (tokens, confidences) of one round after `prefix`, whose last token is the bonus token."""
    tokens, drafts, confidences = list(prefix), [], []
    bonus = len(prefix) - 1
    for _ in range(DEPTH):
        exit_hidden, target_hidden, rotary = target(torch.tensor([tokens]))
        starts = torch.arange(len(tokens)).clamp(max=bonus)
        drafted_from = PRUNED if hasattr(head, "d2t") else torch.arange(VOCAB)
        q = target.lm_head(head(exit_hidden, target_hidden, rotary, starts))[0, -1, drafted_from].softmax(-1)
        drafts.append(int(drafted_from[q.argmax()]))
        confidences.append(float(q.max()))
        tokens.append(drafts[-1])
    return drafts, confidences


def test_rounds_are_those_of_real_drafting(model_dir, head_dir, text):
    """Every round is drafted again on the head's own drafts and judged by the target's greedy text."""
    target = load_target(str(model_dir), 3, "cpu")
    head = load_head(target, head_dir)
    sources = [np.fromfile(text, dtype=np.uint16)]
    windows, prompt_len = own_held_out(target, sources, 2, SEQ_LEN)
    rounds = draft_rounds(target, head, windows, prompt_len - 1)
    starts = range(prompt_len - 1, SEQ_LEN - DEPTH + 1)
    assert len(rounds.num_accepted) == 2 * len(starts)
    expected = []
    for window in range(2):
        chosen = target.model(windows[window : window + 1]).logits[0].argmax(-1).tolist()
        for start in starts:
            drafts, confidences = draft_token_by_token(target, head, windows[window, : start + 1].tolist())
            agreed = [draft == choice for draft, choice in zip(drafts, chosen[start:], strict=False)] + [False]
            accepted = agreed.index(False)
            expected.append((window, accepted, [round(c, 3) for c in confidences[: accepted + 1]]))
    found = [
        (window, accepted, [round(float(c), 3) for c in confidences[: accepted + 1]])
        for confidences, accepted, window in zip(rounds.confidences, rounds.num_accepted, rounds.window, strict=True)
    ]
    assert [entry[:2] for entry in sorted(found)] == [entry[:2] for entry in sorted(expected)]
    for ours, theirs in zip(sorted(found), sorted(expected), strict=True):
        assert ours[2] == pytest.approx(theirs[2], abs=2e-3)  # both rounded to 3 digits
    assert 0 < sum(rounds.num_accepted) < DEPTH * len(found)


@torch.no_grad()
def test_drawn_rounds_are_counted_at_their_chances(model_dir, head_dir, text):
    """The first draft of a round from every position is judged, and accepted with probability sum of min(p, q)."""
    target = load_target(str(model_dir), 3, "cpu")
    head = load_head(target, head_dir)
    windows, prompt_len = own_held_out(target, [np.fromfile(text, dtype=np.uint16)], 2, SEQ_LEN, DRAWN_TEMPERATURE)
    calibration = Calibration()
    count_sampled(calibration, target, head, windows, prompt_len - 1, torch.Generator().manual_seed(0))
    state = calibration.state()
    observed, accepted = (np.array(state[f"drawn_{name}"]).sum(1) for name in ("observed", "accepted"))
    starts = range(prompt_len - 1, SEQ_LEN - DEPTH + 1)
    expected = 0.0
    drafted_from = PRUNED if hasattr(head, "d2t") else torch.arange(VOCAB)
    for window in windows:
        p = (target.model(window[None]).logits[0] / DRAWN_TEMPERATURE).softmax(-1)
        for start in starts:
            exit_hidden, target_hidden, rotary = target(window[None, : start + 1])
            hidden = head(exit_hidden, target_hidden, rotary, torch.arange(start + 1))
            q = (target.lm_head(hidden)[0, -1, drafted_from] / DRAWN_TEMPERATURE).softmax(-1)
            expected += float(torch.minimum(p[start, drafted_from], q).sum())
    assert observed[0] == 2 * len(starts)
    assert accepted[0] == pytest.approx(expected, rel=1e-3)
    assert observed[1:DEPTH] == pytest.approx(accepted[: DEPTH - 1], abs=0.02)  # a table is written to three digits
    assert not np.array(state["observed"]).any(), "greedy drafts are counted elsewhere"


def test_noise_is_gumbels_and_makes_the_text_the_targets_choice():
    """Of texts that the target sampled; whatever else draws by that noise draws from its own distribution."""
    noise, torch_noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    p, q = torch.randn(2, 12, generator=torch_noise).log_softmax(-1)
    text = torch.multinomial(p.exp(), 40_000, replacement=True, generator=torch_noise)
    g = noise_of(p.expand(len(text), -1), text, noise)
    assert torch.equal((p + g).argmax(-1), text)
    assert g.mean().item() == pytest.approx(0.5772, abs=0.01) and g.std().item() == pytest.approx(1.2825, abs=0.01)
    shares = torch.bincount((q + g).argmax(-1), minlength=12) / len(text)
    # Five standard deviations of a token's share.
    assert ((shares - q.exp()).abs() < 5 * (q.exp() / len(text)).sqrt()).all()
    one = noise_of(p[None], text[:1], torch.Generator().manual_seed(3))
    assert torch.equal(one, noise_of(p[None], text[:1], torch.Generator().manual_seed(3)))


@torch.no_grad()
def test_a_head_that_says_what_the_target_says_is_right_at_every_margin(model_dir, tmp_path, text):
    """Its noise is the target's: planted noise of its own leaves it as right as chance is."""
    target = load_target(str(model_dir), 3, "cpu")
    windows, prompt_len = own_held_out(target, [np.fromfile(text, dtype=np.uint16)], 2, SEQ_LEN, DRAWN_TEMPERATURE)

    def counts(**planted):
        with pytest.MonkeyPatch.context() as patch:
            logits = target.model(windows).logits
            passes = [(slice(0, 2), logits, logits, start) for start in range(prompt_len - 1, prompt_len + DEPTH - 1)]
            patch.setattr(calibrate, "draft_passes", lambda *args: passes)
            for name, value in planted.items():
                patch.setattr(calibrate, name, value)
            calibration = Calibration()
            count_sampled(calibration, target, None, windows, prompt_len - 1, torch.Generator().manual_seed(0))
        state = calibration.state()
        observed, accepted = (np.array(state[f"shared_noise_{name}"]) for name in ("observed", "accepted"))
        assert observed[0].sum() == 2 * len(range(prompt_len - 1, SEQ_LEN - DEPTH + 1))
        return observed, accepted

    observed, accepted = counts()
    assert np.array_equal(observed, accepted) and (observed.sum(0) > 0).sum() > 5
    observed, accepted = counts(noise_of=lambda p, text, generator: torch.zeros_like(p).exponential_().log().neg())
    assert accepted.sum() < 0.8 * observed.sum()


def make_rounds(num_rounds, acceptance, num_windows=40, seed=0) -> Rounds:
    """Rounds whose tokens are accepted with probability acceptance(confidence, position, window)."""
    rng = np.random.default_rng(seed)
    window = np.arange(num_rounds) % num_windows
    confidences = rng.random((num_rounds, DEPTH)).astype(np.float32)
    rate = acceptance(confidences, np.arange(DEPTH)[None], window[:, None])
    accepted = (rng.random((num_rounds, DEPTH)) < rate).astype(np.int64).cumprod(1).sum(1)
    return Rounds(confidences, accepted, window)


def test_only_reached_tokens_are_judged():
    rounds = Rounds(np.array([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]], np.float32), np.array([1, 3]), np.array([0, 0]))
    confidence, position, accepted = rounds.judged()
    assert confidence.tolist() == pytest.approx([0.9, 0.8, 0.6, 0.5, 0.4])
    assert position.tolist() == [0, 1, 0, 1, 2] and accepted.tolist() == [True, False, True, True, True]


def test_the_table_learns_confidence_and_position():
    rounds = make_rounds(20_000, lambda c, position, _: 0.9 * c * 0.9**position)
    table = count(rounds)
    for position in (0, 1):
        for confidence in (0.35, 0.85):
            rate = table.acceptance(np.array([confidence], np.float32), position)[0]
            assert rate == pytest.approx(0.9 * confidence * 0.9**position, abs=0.05)
    before, after = calibration_errors(rounds)
    assert before > 0.05 and after < 0.02


def test_true_confidences_have_no_error():
    before, after = calibration_errors(make_rounds(20_000, lambda c, *_: c))
    assert before < 0.02 and after < 0.03


def test_the_prior_is_the_distribution_rates_come_from():
    rates = np.random.default_rng(1).beta(6.0, 2.0, size=400)
    prior = fit_prior(make_rounds(40_000, lambda c, _, window: rates[window] + 0 * c, num_windows=400))
    assert prior.alpha / (prior.alpha + prior.beta) == pytest.approx(0.75, abs=0.05)
    assert prior.alpha + prior.beta == pytest.approx(8.0, rel=0.35)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_head_that_is_always_right_or_wrong_gives_no_certainty(rate):
    prior = fit_prior(make_rounds(200, lambda c, *_: rate + 0 * c))
    assert 0 < min(prior.alpha, prior.beta) and prior.alpha + prior.beta <= 50.01


def make_args(model_dir, head_dir, text, **changes) -> Namespace:
    given = {"model": str(model_dir), "head": str(head_dir), "data": [str(text)], "windows": 4, "seq_len": SEQ_LEN}
    return Namespace(**(given | {"json": None, "chat_template": None} | changes))


def test_run_writes_what_the_engine_reads(model_dir, head_dir, text, tmp_path, capsys):
    weights = head_dir / "model.safetensors"
    bytes_before = weights.read_bytes() if weights.exists() else None
    assert run(make_args(model_dir, head_dir, text, json=str(tmp_path / "out.json"))) == 0
    outcome = json.loads((tmp_path / "out.json").read_text())
    table = Calibration.load(head_dir)
    assert sum(map(sum, table.state()["observed"])) >= outcome["rounds"] > 0
    greedy, drawn, shared_noise = table.position_rates[:, :8].tolist()
    assert shared_noise == pytest.approx(outcome["shared_noise_acceptance_per_position"], abs=1e-3)
    assert greedy == pytest.approx(outcome["acceptance_per_position"], abs=1e-3)
    assert drawn == pytest.approx(outcome["drawn_acceptance_per_position"], abs=1e-3)
    assert ExitHeadConfig.load(head_dir).prior.model_dump() == outcome["prior"]
    assert (weights.read_bytes() if weights.exists() else None) == bytes_before
    assert not [path for path in head_dir.iterdir() if path.name.startswith(".")]
    out = capsys.readouterr().out
    assert (
        "drawn by shared noise" in out
        and "calibration error" in out
        and f"next: {outcome['next']}" in out
        and str(head_dir) in outcome["next"]
    )


def test_a_new_head_drops_the_old_calibration(model_dir, head_dir, text):
    run(make_args(model_dir, head_dir, text))
    target = load_target(str(model_dir), 2, "cpu")
    head = new_head(target, "last", "transformer")
    write_head(head_dir, head_config(target, str(model_dir), "transformer", Prior()), head.state_dict())
    assert not (head_dir / "calibration.json").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head": "/nowhere"}, ("/nowhere", "no such directory")),
        ({"data": ["/nowhere.bin"]}, ("/nowhere.bin",)),
        ({"seq_len": 4_000}, ("seq_len", "4000", "128")),
        ({"seq_len": 12}, ("seq_len", "12", "16")),
        ({"windows": 1}, ("windows", "1", "2")),
    ],
)
def test_refusals(model_dir, tmp_path, text, changes, words):
    target = load_target(str(model_dir), 3, "cpu")
    write_head(tmp_path / "head", head_config(target, str(model_dir), "headless", Prior()), {})
    with pytest.raises(ValueError) as caught:
        run(make_args(model_dir, tmp_path / "head", text, **changes))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)
