"""The target's weights change while the engine runs, as a trainer's do: texts and drafts are those of the new ones."""

import json
import shutil
from dataclasses import dataclass

import pytest
import tensor_parallel
import torch
from safetensors.torch import load_file, save_file
from test_tensor_parallel import run_two_ranks
from test_training_parity import K, count_mismatches, write_new_head, write_with_norms_of_its_own
from test_training_parity import prompts as prompts

#: Half of the target's vocabulary is drafted from.
TOKEN_IDS = torch.arange(0, 512, 2)
SPEC = {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed"}
#: 8 bits of logits of about 10, through 8 layers: plain vLLM's own tokens were up to 0.24 less likely than the best.
BFLOAT16_TIE = 0.4


@pytest.fixture(scope="module")
def new_target(random_target, tmp_path_factory):
    """Directory of the random target with other norms and another LM head."""
    directory = write_with_norms_of_its_own(random_target, tmp_path_factory.mktemp("targets") / "new")
    tensors = load_file(f"{directory}/model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(7, 0).contiguous()
    save_file(tensors, f"{directory}/model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def new_head(new_target, tmp_path_factory):
    """(Its directory, target, head): a head of the new target from which all is derived that there is."""
    shape = {"token_ids": TOKEN_IDS, "head_layers": 2, "aux_layers": [4]}
    return write_new_head(new_target, tmp_path_factory.mktemp("heads") / "new", "deep_context", **shape)


def reload_weights(llm, directory):
    """Have the engine serve another checkpoint's weights, as vLLM's users do."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
    assert llm.reset_prefix_cache()


@pytest.fixture
def reloaded(engine, greedy, drafter_of, random_target, new_target, new_head, prompts):
    """A function that returns (texts before, texts after, the rounds of these, the policies of both)."""

    def reload(**options):
        with engine(random_target, SPEC | {"model": new_head[0]}, **options) as llm:
            before, policy = greedy(llm, prompts), drafter_of(llm).policy
            reload_weights(llm, new_target)
            llm.collective_rpc("eesd_take_rounds")
            after = greedy(llm, prompts)
            (rounds,) = llm.collective_rpc("eesd_take_rounds")
            return before, after, rounds, (policy, drafter_of(llm).policy)

    return reload


@pytest.mark.feature("reload_weights with another checkpoint", "the same answers, and drafts of the new weights")
@pytest.mark.parametrize("packed", [True, False], ids=["packed by oneDNN", "read where they lie"])
def test_reloaded_weights(new_target, new_head, prompts, plain_answers, reloaded, monkeypatch, packed):
    """What was learned of the old weights' drafts is forgotten, what a step costs is not; all of it compiled."""
    from vllm import _custom_ops

    if not packed:  # as on a GPU
        monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    (expected,) = plain_answers(new_target, (prompts, 48))
    before, after, rounds, (old, new) = reloaded(enforce_eager=False)
    assert after == expected != before
    compared, mismatches = count_mismatches(*new_head[1:], prompts, after, rounds)
    assert compared > 500 and mismatches == 0
    assert new.costs is old.costs and new.posterior is not old.posterior and new.calibration is not old.calibration


@pytest.mark.parametrize("kept", ["ratios of norms", "rows of the LM head"])
def test_what_is_not_derived_anew_is_noticed(new_head, prompts, reloaded, monkeypatch, kept):
    from vllm_eesd.host.model.draft_vocabulary import DraftVocabulary
    from vllm_eesd.host.model.exit_head import DeepContextHead, ExitHead

    if kept == "ratios of norms":
        monkeypatch.setattr(DeepContextHead, "target_changed", ExitHead.target_changed)
    else:
        monkeypatch.setattr(DraftVocabulary, "target_changed", lambda self, target: None)
    _, after, rounds, _ = reloaded()
    compared, mismatches = count_mismatches(*new_head[1:], prompts, after, rounds)
    assert mismatches > 0.1 * compared


@pytest.fixture
def clone_of_the_new(new_target, plain_answers, cloned_head, prompts):
    """EESD with the new target's last layer for a head: of the old weights' drafts few fit, of the new ones' all.

    It drafts from rows of the LM head: all but one of a token that these texts do not have.
    """
    (texts,) = plain_answers(new_target, (prompts, 48))
    unused = min(set(range(512)) - set(sum(texts, ())))
    return SPEC | {"model": cloned_head(new_target, 7, 7, token_ids=[id_ for id_ in range(512) if id_ != unused])}


def test_acceptance_recovers(engine, greedy, clone_of_the_new, random_target, new_target, prompts):
    with engine(random_target, clone_of_the_new, enforce_eager=False) as llm:
        for directory, everything in ((None, False), (new_target, True), (random_target, False), (new_target, True)):
            if directory is not None:
                reload_weights(llm, directory)
            llm.collective_rpc("eesd_reset_stats")
            greedy(llm, prompts)
            (stats,) = llm.collective_rpc("eesd_stats")
            assert (stats["accepted"] == stats["drafted"] > 100) is everything


@pytest.mark.feature("reload_weights, tensor_parallel_size=2", "the same answers, and drafts of the new weights")
def test_two_ranks(random_target, new_target, new_head, plain_answers):
    """Each rank derives its part anew."""
    (expected,) = plain_answers(new_target, (tensor_parallel.PROMPTS, 40))
    words, _, said = run_two_ranks(random_target, new_head[0], new_target)
    assert "RELOADED" in words, said[-4000:]
    outputs, rounds = json.loads(words["RELOADED"])
    assert [tuple(tokens) for tokens in outputs] == expected != json.loads(words["SERVED"])[0]
    for of_rank in rounds:
        compared, mismatches = count_mismatches(*new_head[1:], tensor_parallel.PROMPTS, map(tuple, outputs), of_rank)
        assert compared > 300 and mismatches == 0


@pytest.mark.feature("reload_weights, bfloat16", "the new weights' answers; ties of bfloat16 may fall otherwise")
def test_bfloat16(engine, greedy, plain_answers, clone_of_the_new, random_target, new_target, prompts):
    """Plain vLLM's own texts hang on a batch's shape there, so every token is compared with the best after its text."""
    (expected,) = plain_answers(new_target, (prompts, 48), dtype="bfloat16")
    with engine(random_target, clone_of_the_new, dtype="bfloat16", enforce_eager=False) as llm:
        before = greedy(llm, prompts)
        reload_weights(llm, new_target)
        llm.collective_rpc("eesd_reset_stats")
        after = greedy(llm, prompts)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert (lost_by(random_target, prompts, before) < BFLOAT16_TIE).all()
    assert (lost_by(new_target, prompts, before) > BFLOAT16_TIE).float().mean() > 0.9
    for texts in (expected, after):
        assert (lost_by(new_target, prompts, texts) < BFLOAT16_TIE).all()
    assert stats["drafted"] > 100 and stats["accepted"] > 0.9 * stats["drafted"]


def lost_by(target, prompts, texts):
    """Return how much less likely than the best each token is after its text, logits in float32, [num_tokens]."""
    from transformers import AutoModelForCausalLM

    model, lost = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), []
    with torch.no_grad():
        for prompt, text in zip(prompts, texts, strict=True):
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
            lost.append(logits.max(-1).values - logits[range(len(text)), list(text)])
    return torch.cat(lost)


def test_a_request_that_runs_meanwhile(engine, random_target, new_target, clone_of_the_new, drafter_of):
    """Its text goes on by the new weights after the old ones' keys and values, and its drafts of the old are judged."""
    from vllm import SamplingParams

    prompt, length = {"prompt_token_ids": [5, 17, 300, 2]}, 40

    def answer(spec, switch_at):
        """Return (the text, its length when the weights changed), which is the first one of at least `switch_at`."""
        with engine(random_target, spec) as llm:
            params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=length)
            llm.llm_engine.add_request("a", prompt, params)
            tokens, switched = [], 0
            while llm.llm_engine.has_unfinished_requests():
                for output in llm.llm_engine.step():
                    tokens = list(output.outputs[0].token_ids)
                if len(tokens) >= switch_at and not switched:
                    switched = len(tokens)
                    llm.collective_rpc("reload_weights", kwargs={"weights_path": new_target})
            return tokens, switched

    drafted, switched = answer(clone_of_the_new, 12)
    assert answer(None, switched) == (drafted, switched)
    assert answer(None, length)[0] != drafted


@pytest.mark.feature("a target with tied embeddings, reloaded", "the new weights' answers")
def test_tied_embeddings(engine, greedy, plain_answers, cloned_head, prompts, tmp_path):
    """On a CPU vLLM 0.32 goes on with the LM head it has packed, of the old weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directories = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=512, tie_word_embeddings=True, initializer_range=0.12, **size)
        directories.append(str(tmp_path / str(seed)))
        LlamaForCausalLM(config).save_pretrained(directories[-1])
    old, new = directories
    (expected,) = plain_answers(new, (prompts, 48))
    with engine(old, SPEC | {"model": cloned_head(new, 3, 3)}) as llm:
        reload_weights(llm, new)
        assert greedy(llm, prompts) == expected
        (stats,) = llm.collective_rpc("eesd_stats")
        assert stats["accepted"] == stats["drafted"] > 100


@dataclass
class Checkpoint:
    """What a trainer of these tests says: where the weights are."""

    directory: str = ""


@pytest.fixture
def trainer():
    """Name of a weight transfer engine that works on a CPU: vLLM's own ones need GPUs."""
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class FromFiles(WeightTransferEngine):
        init_info_cls = update_info_cls = Checkpoint

        def init_transfer_engine(self, init_info):
            pass

        def start_weight_update(self):
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info):
            self.model.load_weights(load_file(f"{update_info.directory}/model.safetensors").items())

        def finish_weight_update(self):
            finalize_layerwise_reload(self.model, self.model_config)

        def update_weights(self, update_info):
            self.receive_weights(self.parse_update_info(update_info))

        def shutdown(self):
            pass

        trainer_send_weights = None

    FromFiles.__abstractmethods__ = frozenset()
    WeightTransferEngineFactory.register_engine("from_files", FromFiles)
    yield "from_files"
    del WeightTransferEngineFactory._registry["from_files"]


@pytest.mark.feature("weights sent by a trainer (`weight_transfer_config`)", "the same answers, drafts of the new ones")
def test_a_trainer_sends_the_weights(
    engine, greedy, plain_answers, random_target, new_target, clone_of_the_new, trainer, prompts
):
    (expected,) = plain_answers(new_target, (prompts, 48))
    with engine(random_target, clone_of_the_new, weight_transfer_config={"backend": trainer}) as llm:
        greedy(llm, prompts[:1])
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.start_weight_update()
        llm.update_weights({"update_info": {"directory": new_target}})
        llm.finish_weight_update()
        assert llm.reset_prefix_cache()
        llm.collective_rpc("eesd_reset_stats")
        assert greedy(llm, prompts) == expected
        (stats,) = llm.collective_rpc("eesd_stats")
        assert stats["accepted"] == stats["drafted"] > 100


def test_a_head_that_is_no_longer_on_disk(
    engine, greedy, plain_answers, random_target, new_target, new_head, prompts, tmp_path, log_lines
):
    """The update has been made: the engine says that drafts will be worse, and goes on."""
    (expected,) = plain_answers(new_target, (prompts, 48))
    head = shutil.copytree(new_head[0], tmp_path / "head")
    with engine(random_target, SPEC | {"model": str(head)}) as llm:
        shutil.rmtree(head)
        reload_weights(llm, new_target)
        assert "the exit head is still that of the target's old weights" in "\n".join(log_lines)
        assert greedy(llm, prompts) == expected


def test_state_of_the_old_weights_is_not_taken_up_again(
    engine, greedy, drafter_of, random_target, new_target, clone_of_the_new, prompts, tmp_path
):
    path = tmp_path / "state.json"
    spec = clone_of_the_new | {"policy": "goodput", "state_file": str(path)}
    with engine(random_target, spec) as llm:
        prior = drafter_of(llm).policy.posterior.state()
        greedy(llm, prompts)
        drafter_of(llm).policy.save_state()
        assert json.loads(path.read_text())["priors"] != prior
        reload_weights(llm, new_target)
        assert drafter_of(llm).policy.posterior.state() == prior
        drafter_of(llm).policy.save_state()
        assert json.loads(path.read_text())["priors"] == prior
