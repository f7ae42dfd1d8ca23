"""How many tokens' logits exist at a time, where logits and loss are computed in chunks."""

from __future__ import annotations

from math import ceil

LOGITS_BYTES = 64 * 2**20  # of a microbatch in float32: those of fewer are not worth chunks
SMALLEST_CHUNK = (
    256  # tokens of a chunk that keep products efficient and gradients of weights from being read often
)


def loss_chunk_tokens(choice: int | None, tokens: int, columns: int, hidden: int) -> int:
    """Tokens of a chunk; 0: the loss is not computed in chunks.

    Where it is left open, a chunk is half as many tokens as there are features: its logits in float32 then
    take half the memory of the layer's weights in float32, an eighth of theirs and their states'. Fewer would
    read and write the gradient of the weights more often than its product takes.

    Args:
        choice: `Job.loss_chunk`.
        tokens: of a microbatch on this rank.
        columns: entries of the vocabulary on this rank.
        hidden: features of a token.
    """
    if choice is not None:
        return choice and min(choice, tokens)
    longest = max(SMALLEST_CHUNK, hidden // 2)
    if 4 * tokens * columns <= LOGITS_BYTES or tokens <= longest:
        return 0
    return ceil(tokens / ceil(tokens / longest))
