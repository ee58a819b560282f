"""How long a sequence may become: what the context and the pool hold."""

from __future__ import annotations

from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.request import Request
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError


def longest_sequence(pool: BlockManager, max_model_len: int) -> int:
    """Most tokens of prompt and output together. The last one is never fed, so it needs no place in the pool."""
    return min(max_model_len, pool.num_blocks * pool.block_size + 1)


def check_size(request: Request, pool: BlockManager, max_model_len: int) -> None:
    """Raises InvalidRequestError for an empty prompt, RequestTooLargeError for one that leaves no room for a token.

    A request for a vector needs no such room.
    """
    new = 0 if request.pooling else 1
    check_length(request.num_prompt_tokens, max_model_len, pool.num_blocks, pool.block_size, new=new)


def check_length(num_prompt_tokens: int, max_model_len: int, num_blocks: int, block_size: int, *, new: int = 1) -> None:
    """As `check_size`, of a prompt's length; for whoever knows the pool by its numbers only.

    Args:
      new: tokens that must fit after it: 1, or 0 for a vector.
    """
    length, needed = num_prompt_tokens, -(-(num_prompt_tokens + new) // block_size)
    and_new = " and one new token" if new else ""
    if length < 1:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if length > max_model_len - new:
        raise RequestTooLargeError(
            f"the prompt has {length} tokens; the context of {max_model_len} leaves room for {max_model_len - new}"
            f"{and_new}",
            param="prompt",
        )
    if needed > num_blocks:
        raise RequestTooLargeError(
            f"the prompt of {length} tokens{and_new} need {needed} blocks of {block_size} tokens; the KV cache "
            f"has {num_blocks}",
            param="prompt",
        )
