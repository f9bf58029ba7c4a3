"""What no request may ask for."""

from __future__ import annotations

from valuspec.engine.kv_cache import BLOCK
from valuspec.engine.places import blocks_for
from valuspec.engine.types import GenerationRequest
from valuspec.errors import RequestError


def validate_request(
    request: GenerationRequest, *, vocab_size: int, max_model_len: int, num_blocks: int
) -> None:
    """Raise RequestError if the request can never be served.

    num_blocks: all blocks of the cache
    """
    prompt, resumed, max_tokens = request.prompt_ids, request.resumed_ids, request.params.max_tokens
    if not prompt:
        raise RequestError("the prompt has no tokens", param="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RequestError(f"prompt token ids must lie in 0..{vocab_size - 1}", param="prompt")
    if len(resumed) >= max_tokens or any(not 0 <= id_ < vocab_size for id_ in resumed):
        raise RequestError(
            f"{len(resumed)} tokens cannot be resumed: they must be of the vocabulary and "
            f"fewer than max_tokens, {max_tokens}",
            param="resumed_ids",
        )
    wanted = len(prompt) + max_tokens
    parts = f"({len(prompt)} in the prompt, {max_tokens} for the output)"
    if wanted > max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens, but {wanted} were "
            f"requested {parts}. Shorten the prompt or lower max_tokens.",
            param="prompt",
            code="context_length_exceeded",
        )
    if blocks_for(wanted) > num_blocks:
        raise RequestError(
            f"{wanted} tokens were requested {parts}, but the cache of this server holds "
            f"{num_blocks * BLOCK} with its work space. Shorten the prompt or lower max_tokens.",
            param="prompt",
            code="context_length_exceeded",
        )
