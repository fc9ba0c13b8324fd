"""`ServerContext`: what every handler needs, stored once in the application."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from paged._version import __version__
from paged.server.errors import ApiError
from paged.server.limits import StreamSlots
from paged.server.metrics import EngineMetrics
from paged.server.optional_metrics import ResidencyMetrics, WorkMetrics
from paged.server.output_formats import reasoning_format, tool_format
from paged.server.reasoning import ReasoningFormat
from paged.server.request_watch import RequestWatch
from paged.server.response_store import ResponseStore
from paged.server.response_tasks import ResponseTasks
from paged.server.sampling import sampling_defaults
from paged.server.served_models import ServedModels
from paged.server.settings import ServerSettings
from paged.server.tier_metrics import TierMetrics
from paged.server.tool_parsers.formats import ToolFormat

if TYPE_CHECKING:
    from paged.models.chat_template import ChatTemplate
    from paged.scheduler.async_engine import AsyncEngine

# Texts of all stored responses together, each with the conversation before it.
_MAX_STORED_BYTES = 256 << 20


@dataclass(slots=True)
class ServerContext:
    """The engine and what was derived from it at start-up; only the last two change.

    Attributes:
      engine: serves the requests.
      settings: of the HTTP layer.
      models: that requests may name.
      sampling_defaults: of requests that leave a parameter out.
      chat_template: instead of the checkpoint's, if the settings bring one or change its format.
      tool_format: in which the model writes tool calls, None if it is not known.
      reasoning_format: in which it writes its reasoning, None to leave that in the text.
      metrics: fed by the engine.
      fingerprint: `system_fingerprint` of the answers; changes with version, model and settings.
      responses: of /v1/responses, for their successors.
      response_tasks: those that run in the background.
      request_watch: brings the engine's records of requests to who wants them.
      max_token_chars: characters of the longest token, for a bound on the tokens of a text.
      max_tokens_cap: most tokens that any request may generate; None: as many as fit.
      streams: counts those that are open.
      is_draining: the server is about to stop and takes no new requests.
    """

    engine: "AsyncEngine"
    settings: ServerSettings
    models: ServedModels
    sampling_defaults: Mapping[str, Any]
    chat_template: "ChatTemplate | None"
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    metrics: EngineMetrics
    fingerprint: str
    responses: ResponseStore
    response_tasks: ResponseTasks
    max_token_chars: int
    max_tokens_cap: int | None
    streams: StreamSlots
    request_watch: RequestWatch = field(default_factory=RequestWatch)
    is_draining: bool = False

    @property
    def model_name(self) -> str:
        """The base model's name, which its answers carry."""
        return self.models.base.name

    @property
    def auto_tool_choice(self) -> bool:
        """Whether the model may decide about tool calls."""
        return self.tool_format is not None and self.settings.enable_auto_tool_choice is not False

    def check_accepting(self) -> None:
        """Refuse new work with 503 while the server drains."""
        if self.is_draining:
            raise ApiError("The server is shutting down and takes no new requests.", status=503)


CONTEXT = web.AppKey("context", ServerContext)


def make_context(engine: "AsyncEngine", settings: ServerSettings) -> ServerContext:
    """Return the context of an application.

    Raises: ValueError if the checkpoint's sampling defaults, or the settings' template or parsers
      are wrong.
    """
    names = settings.served_model_names or (engine.model_name,)
    template, own = None, engine.checkpoint.chat_template
    if settings.chat_template is not None:
        template = make_chat_template(engine, settings, settings.chat_template)
    elif own is not None and settings.chat_template_content_format != "auto":
        template = make_chat_template(engine, settings, own.source)
    used = template or own
    source = "" if used is None else used.source
    identity = f"{__version__} {engine.model_name} {engine.config}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return ServerContext(
        engine=engine,
        settings=settings,
        models=ServedModels(engine, names),
        sampling_defaults=sampling_defaults(engine, settings.override_generation_config),
        chat_template=template,
        tool_format=tool_format(settings, source),
        reasoning_format=reasoning_format(settings, source),
        metrics=_make_metrics(engine, names[0]),
        fingerprint=f"paged-{__version__}-{digest}",
        responses=ResponseStore(
            max_responses=settings.max_stored_responses, max_bytes=_MAX_STORED_BYTES
        ),
        response_tasks=ResponseTasks(),
        # Byte-level vocabularies spell one character per byte, so this is never too small.
        max_token_chars=max(map(len, engine.tokenizer.backend.get_vocab())),
        max_tokens_cap=settings.override_generation_config.get("max_new_tokens"),
        streams=StreamSlots(settings.max_concurrent_streams),
    )


def _make_metrics(engine: "AsyncEngine", model_name: str) -> EngineMetrics:
    metrics = EngineMetrics(
        model_name,
        engine.max_model_len,
        engine.cache_info,
        max_loras=engine.config.max_loras if engine.config.enable_lora else None,
    )
    labels, registry = metrics.labels, metrics.registry
    if engine.config.kv_cache_metrics:
        metrics.add(ResidencyMetrics(labels, registry))
    if engine.config.enable_mfu_metrics:
        metrics.add(WorkMetrics(labels, registry))
    if engine.config.kv_offloading_size:
        TierMetrics(labels, registry, engine.tier_stats)
    return metrics


def make_chat_template(
    engine: "AsyncEngine", settings: ServerSettings, source: str
) -> "ChatTemplate":
    """Return a template that renders with the model's own special tokens."""
    from paged.models.chat_template import ChatTemplate  # jinja2: only where a template is given

    tokenizer = engine.tokenizer
    wanted = settings.chat_template_content_format
    return ChatTemplate(
        source,
        tokenizer.bos_token,
        tokenizer.eos_token,
        content_format=None if wanted == "auto" else wanted,
    )
