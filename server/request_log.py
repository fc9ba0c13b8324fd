"""`log_request`: what `--enable-log-requests` writes."""

import logging
from collections.abc import Sequence

from paged.scheduler.lora_request import LoRARequest
from paged.scheduler.params import SamplingParams
from paged.server.prompts import Prompt

logger = logging.getLogger(__name__)


def log_request(
    request_id: str,
    params: SamplingParams | None,
    prompts: Sequence[Prompt],
    max_log_len: int | None,
    *,
    lora: LoRARequest | None = None,
) -> None:
    """Log a request's id and parameters; its prompts only at debug level, as in the reference.

    Args:
      request_id: of the answer.
      params: of its first prompt.
      prompts: texts and token ids.
      max_log_len: most characters and ids of a prompt that are shown; None: all.
      lora: adapter that it names.
    """
    extra = {"request_id": request_id}
    logger.info(
        "Received request %s: params: %s, lora_request: %s.", request_id, params, lora, extra=extra
    )
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for index, prompt in enumerate(prompts):
        text = None if prompt.text is None else prompt.text[:max_log_len]
        ids = list(prompt.token_ids[:max_log_len])
        logger.debug(
            "Request %s, prompt %d: %r, token ids: %s.", request_id, index, text, ids, extra=extra
        )
