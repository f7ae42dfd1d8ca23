"""Conversations, and tokenizers with chat templates in the style of well-known families, made in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SPECIAL = {
    "llama3": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    "gemma": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
}
BEGIN_END = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "chatml": (None, "<|im_end|>"),
    "mistral": ("<s>", "</s>"),
    "gemma": ("<bos>", "<eos>"),
}
TEMPLATES = {
    "llama3": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'You help.' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system }}
{%- if tools %}
    {{- '\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\n\n' }}
    {%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- if message.tool_calls %}
                {{- message.tool_calls[0].function | tojson }}
            {%- else %}
                {{- message['content'] | trim }}
            {%- endif %}
            {{- '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
    "chatml": """{% set ns = namespace(count=0) %}
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
    {% endif %}
<|im_start|>{{ message.role }}
    {%- if message.role == 'assistant' %}
{% generation %}
{{ '\n' + message.content }}<|im_end|>{% endgeneration %}
    {%- else %}

{{ message.content }}<|im_end|>
    {%- endif %}

    {%- set ns.count = ns.count + 1 %}
{% if message.content == 'stop' %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}""",
    "mistral": """{%- set loop_messages = messages %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}
            {{- ' ' + message['content'] + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
    {%- if role == 'model' -%}
        {%- generation -%}
        {{ message['content'] | trim }}{{ '<end_of_turn>\n' }}
        {%- endgeneration -%}
    {%- else -%}
        {{ message['content'] | trim }}{{ '<end_of_turn>\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}""",
}


def unmarked(template: str) -> str:
    """The template as most models ship it: without `{% generation %}`."""
    for word in ("generation", "endgeneration"):
        for form in ("{%%- %s -%%}", "{%%- %s %%}", "{%% %s %%}"):
            empty = (form % word).replace(word, "if true" if word == "generation" else "endif")
            template = template.replace(form % word, empty)
    return template


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def chat(turns: int, question: str = "how are you") -> list[dict[str, Any]]:
    """A conversation of so many questions and answers, all different."""
    return [
        message
        for i in range(turns)
        for message in (user(f"{question} {i}?"), assistant(f"answer {i} to {question}: ünïcödé 🙂 {i * i}"))
    ]


def tokenizer_folder(folder: Path, style: str, template: str | None = None) -> Path:
    """A small byte-level tokenizer with the special tokens and the template of a style, as models ship it."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL[style],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator([m["content"] for m in chat(20)], trainer)
    begin, end = BEGIN_END[style]
    if begin is not None:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, inner.token_to_id(begin))]
        )
    inner.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": {"__type": "AddedToken", "content": end, "special": True},
        "chat_template": TEMPLATES[style] if template is None else template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_chats(path: Path, chats: Sequence[Sequence[dict[str, Any]]]) -> Path:
    """Conversations as JSONL."""
    path.write_text(
        "".join(json.dumps({"messages": list(chat_messages)}) + "\n" for chat_messages in chats),
        encoding="utf-8",
    )
    return path
