"""How long a sequence may become: what the context and the pool hold."""

from __future__ import annotations

from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.request import Request
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError


def longest_sequence(pool: BlockManager, max_model_len: int) -> int:
    """Most tokens of prompt and output together. The last one is never fed, so it needs no place in the pool."""
    return min(max_model_len, pool.num_blocks * pool.block_size + 1)


def check_size(request: Request, pool: BlockManager, max_model_len: int) -> None:
    """Raises InvalidRequestError for an empty prompt, RequestTooLargeError for one that leaves no room for a token."""
    length, needed = request.num_prompt_tokens, pool.blocks_for(request.num_prompt_tokens + 1)
    if length < 1:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if length > max_model_len - 1:
        raise RequestTooLargeError(
            f"the prompt has {length} tokens; the context of {max_model_len} leaves room for {max_model_len - 1} and "
            f"one new token",
            param="prompt",
        )
    if needed > pool.num_blocks:
        raise RequestTooLargeError(
            f"the prompt of {length} tokens and one new token need {needed} blocks of {pool.block_size} tokens; the "
            f"KV cache has {pool.num_blocks}",
            param="prompt",
        )
