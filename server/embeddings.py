"""POST /v1/embeddings: a vector of each input, made of its tokens' final hidden states."""

import base64
from contextlib import aclosing

import numpy as np
from aiohttp import web

from paged.scheduler.params import Pooling, PoolingParams
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
    pooling = _choose_pooling(context)
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
        params=[PoolingParams(pooling=pooling)] * len(prompts),
        handling=handling,
    )
    vectors = await _vectors(generation)
    if context.settings.pooler_config.normalize:
        vectors = [vector / max(float(np.linalg.norm(vector)), 1e-12) for vector in vectors]
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
    """Return the vectors, float32 `[hidden_size]`, in the order of the prompts.

    Raises: ApiError if the engine has ended a request before it had one.
    """
    vectors: dict[int, np.ndarray] = {}
    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            if output.finished:
                if output.pooled is None:
                    raise ApiError("An input was aborted; send the request again.", status=503)
                vectors[index] = output.pooled
    return [vectors[index] for index in range(len(generation.prompts))]


def _spell(vector: np.ndarray, encoding_format: str | None) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _choose_pooling(context: ServerContext) -> Pooling:
    """Return how vectors are made: as the server is told, else as the model was trained.

    Raises: ApiError if the model wants what there is not: other vectors of it would mean nothing.
    """
    if (told := context.settings.pooler_config.pooling) is not None:
        return told
    modes = context.engine.checkpoint.pooling_modes
    known: dict[frozenset[str], Pooling] = {
        frozenset(): "last",
        frozenset({"lasttoken"}): "last",
        frozenset({"mean"}): "mean",
    }
    if modes not in known:
        raise ApiError(
            f"This model pools its tokens by {', '.join(sorted(modes))} (1_Pooling/config.json), "
            "and this version only by lasttoken or mean; serve another model for embeddings, or "
            'choose with --pooler-config \'{"pooling_type": "MEAN"}\'.',
            status=501,
        )
    return known[modes]


def _check_dimensions(context: ServerContext, request: EmbeddingRequest) -> None:
    size = context.engine.checkpoint.model_config.hidden_size
    if request.dimensions not in (None, size):
        raise ApiError(
            f"dimensions must be {size} or left out, got {request.dimensions}: this model's "
            "vectors keep their meaning only as a whole.",
            param="dimensions",
        )
