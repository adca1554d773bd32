"""Chat templates for tests, which cover the differences between real ones."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from trimtab.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Trims contents, begins with the beginning token, two special tokens around a role.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# No prompt for an answer, a space before it, roles must alternate, the system prompt inside the first question.
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='', turn=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}{% continue %}{% endif %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + ' [/INST]' }}{% set ns.system = '' %}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% set ns.turn = ns.turn + 1 %}{% endfor %}"
)
# As above, but the system prompt stands in the last question: no conversation is a beginning of a longer one.
MISTRAL_LATE_SYSTEM = (
    "{{ bos_token }}{% set ns = namespace(system='', last=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}{% endif %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST]' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
# The assistant is called model, contents are trimmed, there is no system prompt.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}"
    "{{ '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# Thinking is shown after the last question only, where an empty one is set if there was none.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% set thought = '' %}{% set answer = m.content %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' + answer }}"
    "{% else %}{{ answer }}{% endif %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
# As above with calls of tools, whose results are said by the user; only the last answer gets an empty thought.
TOOL_THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<result>' + m.content + '</result>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' }}{% set thought = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The prompt for an answer begins the thinking, which earlier answers do not show.
THINKING_PROMPT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
)
# An answer has a channel of its own, and the last one ends with another token than the others.
CHANNELS = (
    "{% for m in messages %}{{ '<|start|>' + m.role }}"
    "{% if m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}{{ '<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# No special token at all.
PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# Calls of tools, and what they answered.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What it writes around an answer depends on the answer.
COUNTING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content | length | string + '\\n' + m.content }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|user|>",
    "<|assistant|>",
    "<s>",
    "</s>",
)
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def chat_tokenizer(template: str | None, *, spaced: bool = False, trimmed: bool = True) -> Tokenizer:
    """A small tokenizer with these special tokens: byte-level, or with SentencePiece's spaces (`spaced`).

    `trimmed` takes the spaces out of tokens' offsets, as the files of Llama 3 and many others do.
    """
    backend = tokenizers.Tokenizer(
        models.BPE(unk_token="<unk>", byte_fallback=True) if spaced else models.BPE()
    )
    backend.pre_tokenizer = (
        pre_tokenizers.Metaspace(split=False) if spaced else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    backend.decoder = decoders.Metaspace() if spaced else decoders.ByteLevel()
    if not spaced:
        backend.post_processor = processors.ByteLevel(trim_offsets=trimmed)
    text = (
        "What is two plus two? It is four. user assistant system Hello! How are you? I am fine, thank you.\n"
    )
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)] if spaced else []
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        initial_alphabet=[] if spaced else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=8,
    )
    backend.train_from_iterator(
        text.split(" ") * 3, trainer
    )  # no token reaches over a space, as in real ones
    backend.add_special_tokens([token for token in SPECIALS if token not in ("<s>", "</s>")])
    return Tokenizer(
        backend,
        bos_id=1,
        eos_id=2,
        stop_ids=frozenset({2}),
        special_tokens=dict(VARIABLES),
        chat_template=template,
    )
