"""The table of all routes: what there is, who answers, what comes in and goes out."""

from paged.server import (
    adapters,
    answer_bodies,
    chat,
    completions,
    embeddings,
    engine_state,
    openapi,
    operations,
    playground,
    profiling,
    protocol,
    response_answers,
    response_request,
    responses,
    tokenization,
)
from paged.server.metrics import CONTENT_TYPE
from paged.server.route import JSON, Parameter, Route
from paged.server.settings import ServerSettings

# 429 where keys are held to so many requests per minute: counts what is posted with a key.
_BODY = (400, 408, 413, 429)
_GENERATION = (*_BODY, 404, 503)
_MODEL = Parameter(
    name="model", place="path", schema={"type": "string", "minLength": 1}, description="A name."
)
_RESPONSE = Parameter(
    name="id", place="path", schema={"type": "string", "minLength": 1}, description="A response."
)
_NUM_STEPS = Parameter(
    name="num_steps",
    place="query",
    schema={"type": "string", "pattern": "^[1-9][0-9]{0,5}$"},
    description="Steps of the engine after which the trace ends by itself.",
)
_RESET_RUNNING = Parameter(
    name="reset_running_requests",
    place="query",
    schema={"type": "string", "pattern": "^(true|false|1|0)$"},
    description="Have running requests preempted; otherwise nothing is forgotten while some run.",
)


def make_routes(settings: ServerSettings) -> list[Route]:
    """Return the routes that these settings open."""
    routes = [
        *_generation_routes(),
        *_response_routes(),
        *_tokenizer_routes(),
        *_model_routes(),
        *_operation_routes(metrics_need_key=settings.metrics_require_key),
    ]
    if settings.allow_runtime_lora_updating:
        routes += _adapter_routes()
    if settings.ui:
        routes += _playground_routes()
    if settings.dev_mode:
        routes += _development_routes()
    if settings.observability.profile_dir is not None:
        routes += _profile_routes()
    return routes


def _model_routes() -> list[Route]:
    return [
        Route(
            method="GET",
            path="/v1/models",
            handler=operations.list_models,
            summary="List the served models.",
            tag="models",
            answer=answer_bodies.ModelList,
        ),
        Route(
            method="GET",
            path="/v1/models/{model:.+}",
            handler=operations.show_model,
            summary="Describe one served model.",
            tag="models",
            answer=answer_bodies.ModelCard,
            parameters=(_MODEL,),
            errors=(404,),
        ),
    ]


def _operation_routes(*, metrics_need_key: bool) -> list[Route]:
    return [
        *[
            Route(
                method=method,
                path=path,
                handler=operations.health,
                summary="Tell whether the engine can serve.",
                tag="operations",
                media=None,
                errors=(503,),
                needs_key=False,  # load balancers have none
            )
            for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"))
        ],
        Route(
            method="GET",
            path="/version",
            handler=operations.version,
            summary="Tell the version of this program.",
            tag="operations",
            answer=answer_bodies.VersionAnswer,
        ),
        Route(
            method="GET",
            path="/load",
            handler=operations.load,
            summary="Count the requests in flight.",
            tag="operations",
            answer=answer_bodies.LoadAnswer,
        ),
        Route(
            method="GET",
            path="/metrics",
            handler=operations.metrics,
            summary="Return the metrics in Prometheus' text format.",
            tag="operations",
            media=CONTENT_TYPE,
            needs_key=metrics_need_key,
        ),
        Route(
            method="GET",
            path="/openapi.json",
            handler=openapi.show_document,
            summary="Return this document.",
            tag="operations",
            media=JSON,
        ),
    ]


def _development_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/reset_prefix_cache",
            handler=operations.reset_prefix_cache,
            summary="Forget all cached prefixes.",
            tag="development",
            answer=answer_bodies.SuccessAnswer,
            parameters=(_RESET_RUNNING,),
            errors=(400, 429, 503),
        ),
    ]


def _adapter_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/v1/load_lora_adapter",
            handler=adapters.load_adapter,
            summary="Serve a LoRA adapter under a name of its own.",
            tag="models",
            body=protocol.LoadAdapterRequest,
            media="text/plain",
            errors=(*_BODY, 404, 503),
        ),
        Route(
            method="POST",
            path="/v1/unload_lora_adapter",
            handler=adapters.unload_adapter,
            summary="Serve a LoRA adapter no more.",
            tag="models",
            body=protocol.UnloadAdapterRequest,
            media="text/plain",
            errors=(*_BODY, 404),
        ),
    ]


def _profile_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/start_profile",
            handler=profiling.start_profile,
            summary="Start a trace of this process by JAX's profiler.",
            tag="operations",
            media=None,
            parameters=(_NUM_STEPS,),
            errors=(400, 409),
        ),
        Route(
            method="POST",
            path="/stop_profile",
            handler=profiling.stop_profile,
            summary="Stop the trace and write it.",
            tag="operations",
            media=None,
            errors=(409,),
        ),
    ]


def _generation_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/v1/completions",
            handler=completions.completions,
            summary="Complete one prompt or several.",
            tag="generation",
            body=protocol.CompletionRequest,
            answer=answer_bodies.CompletionAnswer,
            events=answer_bodies.CompletionChunk | answer_bodies.ErrorAnswer,
            errors=_GENERATION,
        ),
        Route(
            method="POST",
            path="/v1/chat/completions",
            handler=chat.chat_completions,
            summary="Answer a conversation.",
            tag="generation",
            body=protocol.ChatCompletionRequest,
            answer=answer_bodies.ChatCompletionAnswer,
            events=answer_bodies.ChatCompletionChunk | answer_bodies.ErrorAnswer,
            errors=_GENERATION,
        ),
        Route(
            method="POST",
            path="/v1/embeddings",
            handler=embeddings.embeddings,
            summary="Turn texts into vectors.",
            tag="generation",
            body=protocol.EmbeddingRequest,
            answer=answer_bodies.EmbeddingAnswer,
            errors=(*_GENERATION, 501),
        ),
    ]


def _response_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/v1/responses",
            handler=responses.create_response,
            summary="Answer an input, behind an earlier response if it names one.",
            tag="responses",
            body=response_request.ResponseRequest,
            answer=response_answers.ResponseAnswer,
            events=response_answers.AnyEvent,
            errors=_GENERATION,
        ),
        Route(
            method="GET",
            path="/v1/responses/{id}",
            handler=responses.show_response,
            summary="Return a stored response.",
            tag="responses",
            answer=response_answers.ResponseAnswer,
            parameters=(_RESPONSE,),
            errors=(404,),
        ),
        Route(
            method="DELETE",
            path="/v1/responses/{id}",
            handler=responses.delete_response,
            summary="Forget a stored response.",
            tag="responses",
            answer=response_answers.DeletedResponse,
            parameters=(_RESPONSE,),
            errors=(404,),
        ),
        Route(
            method="POST",
            path="/v1/responses/{id}/cancel",
            handler=responses.cancel_response,
            summary="End a response that runs in the background.",
            tag="responses",
            answer=response_answers.ResponseAnswer,
            parameters=(_RESPONSE,),
            errors=(400, 404, 429),
        ),
    ]


def _playground_routes() -> list[Route]:
    return [
        Route(
            method="GET",
            path="/engine/state",
            handler=engine_state.show_engine_state,
            summary="Tell what the engine holds: KV blocks by state, requests, totals.",
            tag="playground",
            answer=engine_state.EngineState,
            errors=(503,),
        ),
        *[
            Route(
                method="GET",
                path=path,
                handler=playground.show_file,
                summary="Return a file of the playground, a page for people.",
                tag="playground",
                media=media,
                needs_key=False,
            )
            for path, media in playground.PAGE_PATHS.items()
        ],
    ]


def _tokenizer_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path="/tokenize",
            handler=tokenization.tokenize,
            summary="Turn a text, or a conversation, into token ids.",
            tag="tokenizer",
            body=protocol.TokenizeChatRequest | protocol.TokenizeTextRequest,
            answer=answer_bodies.TokenizeAnswer,
            errors=(*_BODY, 404),
        ),
        Route(
            method="POST",
            path="/detokenize",
            handler=tokenization.detokenize,
            summary="Turn token ids into a text.",
            tag="tokenizer",
            body=protocol.DetokenizeRequest,
            answer=answer_bodies.DetokenizeAnswer,
            errors=(*_BODY, 404),
        ),
    ]
