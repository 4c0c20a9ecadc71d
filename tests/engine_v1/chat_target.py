"""A chat model that knows a few answers by heart: thoughts, tool calls, JSON, prose.

Its layers are random; its LM head is solved for, so that after every prefix of an answer the next token's logit is
`MARGIN` and the others' are 0. Its tokenizer is the embedded model's with the special tokens of chat models. So nothing
is downloaded and nothing is trained.
"""

import json
from pathlib import Path

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "eesd-code-10m"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinking is defined and thinking %}<think>{% endif %}{% endif %}"
)
MARGIN = 12.0


def tool_call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


#: What is asked, and what the model says.
ANSWERS = {
    "sum": "<think>\nThe sum of 2 and 3 is 5, as 2 + 3 = 5. Let me return it as an object.\n</think>\n"
    '{"name": "sum", "n": 5}',
    "weather": "<think>\nThe user asks for the weather, so call the tool.\n</think>\n"
    + tool_call("get_weather", city="Oslo", days=3),
    "both": "<think>\nTwo calls are needed here.\n</think>\nI call two tools.\n"
    + tool_call("get_time", zone="UTC")
    + "\n"
    + tool_call("get_weather", city="Rome", days=1),
    "story": "<think>\n" + "wait, let me think about it again. " * 4 + "\n</think>\nThis is the end of the story.",
    "list": '{"name": "list", "n": 12} and the rest of the text is not JSON at all.',
    "call": tool_call("get_time", zone="CET") + "\n" + tool_call("get_time", zone="UTC"),
    "tags": "A text with <tool> tags </tool>, <tool_ and </think, which only look like it: <tool_call is not one.",
}


def write(directory):
    """Write the target, trained on its answers, to a directory."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[:2]})
    tokenizer.add_tokens(SPECIAL[2:])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    learn_by_heart(model, [texts_of(tokenizer, *pair) for pair in ANSWERS.items()])
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def texts_of(tokenizer, question, answer):
    """Return (prompt, answer), token ids."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer + "<|im_end|>")]


def learn_by_heart(model, texts):
    """Solve for the LM head: the hidden states of all prefixes are fewer than their dimensions, so there is one."""
    import torch

    states, following = [], []
    for prompt, answer in texts:
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([prompt + answer])).last_hidden_state[0]
        states.append(hidden[len(prompt) - 1 : -1])
        following += answer
    states = torch.cat(states).double()
    assert len(states) < states.shape[1], len(states)
    wanted = torch.zeros(len(states), model.config.vocab_size, dtype=torch.float64)
    wanted[range(len(following)), following] = MARGIN
    head = torch.linalg.pinv(states, rtol=1e-6) @ wanted
    assert ((states @ head).argmax(-1) == torch.tensor(following)).all()
    model.lm_head.weight.data = head.T.float().contiguous()
