"""A tokenizer of single characters with a chat template, for the tiny target of 64 tokens."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<s>", "<|end|>"
SPECIAL = ["<unk>", BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
CHARACTERS = string.ascii_lowercase + string.digits + " \n.,:?!'-AHYTW+*=()[]/"

#: Who speaks, what is said, the end; a system message where there is none, and a line's end no model writes.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|system|>be kind<|end|>\n{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
WITH_GENERATION = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Shows the last question and its answer only.
FORGETFUL = (
    "{% for m in messages[-2:] %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STERN = "{% for m in messages %}{{ raise_exception('roles must\nalternate') }}{% endfor %}"


def chat_tokenizer(template=CHATML, adds_bos=True):
    """The tokenizer; by default it begins every text with BOS, unless told not to."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    names = {"bos_token": BOS, "eos_token": EOS, "unk_token": "<unk>"}
    more = [token for token in SPECIAL if token not in names.values()]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=more, **names)
    tokenizer.chat_template = template
    return tokenizer
