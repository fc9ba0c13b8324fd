"""POST /v1/embeddings: the final hidden state of each input's last token, scaled to length 1."""

import base64
from contextlib import aclosing

import numpy as np
from aiohttp import web

from paged.scheduler.params import PoolingParams
from paged.server.answer_bodies import (
    Embedding,
    EmbeddingAnswer,
    EmbeddingUsage,
    PromptTokensDetails,
)
from paged.server.context import CONTEXT, ServerContext
from paged.server.errors import ApiError, json_response
from paged.server.generation import Generation, response_id
from paged.server.handling import handling_of
from paged.server.prompts import embedding_prompts
from paged.server.protocol import EmbeddingRequest, GenerationRequest, decode_body, read_json


async def embeddings(http_request: web.Request) -> web.Response:
    """Return one vector per input, in their order."""
    context = http_request.app[CONTEXT]
    context.check_accepting()
    request = decode_body(await read_json(http_request), EmbeddingRequest)
    model = context.models.find(request.model)
    _check_pooling(context)
    _check_dimensions(context, request)
    # What the engine is asked for is a generation that ends with its prefill.
    as_generation = GenerationRequest(
        cache_salt=request.cache_salt,
        cache=request.cache,
        request_id=request.request_id,
        priority=request.priority,
    )
    handling = handling_of(http_request, as_generation)
    prompts = await embedding_prompts(context, request)
    generation = Generation(
        context=context,
        model=model,
        request=as_generation,
        response_id=response_id(http_request, as_generation, "embd"),
        prompts=prompts,
        params=[PoolingParams()] * len(prompts),
        handling=handling,
    )
    vectors = await _vectors(generation)
    usage = generation.usage.body()
    return json_response(
        EmbeddingAnswer(
            id=generation.response_id,
            created=generation.created,
            model=model.name,
            data=[
                Embedding(index=index, embedding=_spell(vector, request.encoding_format))
                for index, vector in enumerate(vectors)
            ],
            usage=EmbeddingUsage(
                prompt_tokens=usage["prompt_tokens"],
                total_tokens=usage["prompt_tokens"],
                prompt_tokens_details=PromptTokensDetails(**usage["prompt_tokens_details"]),
            ),
        )
    )


async def _vectors(generation: Generation) -> list[np.ndarray]:
    """Return the vectors of length 1, float32 `[hidden_size]`, in the order of the prompts."""
    vectors: dict[int, np.ndarray] = {}
    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            if output.finished:
                assert output.pooled is not None
                vectors[index] = output.pooled / max(float(np.linalg.norm(output.pooled)), 1e-12)
    return [vectors[index] for index in range(len(generation.prompts))]


def _spell(vector: np.ndarray, encoding_format: str | None) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _check_pooling(context: ServerContext) -> None:
    """Refuse models that were trained for another pooling: their vectors would mean nothing."""
    if others := sorted(context.engine.checkpoint.pooling_modes - {"lasttoken"}):
        raise ApiError(
            f"This model pools its tokens by {', '.join(others)} (1_Pooling/config.json), and this "
            "version only by lasttoken; serve another model for embeddings.",
            status=501,
        )


def _check_dimensions(context: ServerContext, request: EmbeddingRequest) -> None:
    size = context.engine.checkpoint.model_config.hidden_size
    if request.dimensions not in (None, size):
        raise ApiError(
            f"dimensions must be {size} or left out, got {request.dimensions}: this model's "
            "vectors keep their meaning only as a whole.",
            param="dimensions",
        )
