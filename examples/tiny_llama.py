"""Write a folder as published models have it: a tiny Llama 3.1 of random weights, with a tokenizer.

python examples/tiny_llama.py tiny-llama
"""

from __future__ import annotations

import sys
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}<|start|>{{ m['role'] }}: {{ m['content'] }}<|eot_id|>{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained on the library's own source."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end_of_text|>", "<|eot_id|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([Path(tokenizers.__file__).read_text(encoding="utf-8")], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=special[0], eos_token=special[1])
    fast.chat_template = TEMPLATE
    return fast


def main(folder: str) -> None:
    text = tokenizer()
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=len(text),
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        bos_token_id=0,
        eos_token_id=[1, 2],
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=[1, 2], do_sample=True, temperature=0.6, top_p=0.9
    )
    model.save_pretrained(folder, max_shard_size="100KB")
    text.save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main(sys.argv[1])
