"""What operators and tools ask: models, version, health, load, metrics."""

import re

from aiohttp import web

from paged._version import __version__
from paged.server.answer_bodies import (
    LoadAnswer,
    ModelCard,
    ModelList,
    ModelPermission,
    SuccessAnswer,
    VersionAnswer,
)
from paged.server.context import CONTEXT, ServerContext
from paged.server.errors import ApiError, json_response
from paged.server.metrics import CONTENT_TYPE


async def list_models(request: web.Request) -> web.Response:
    """Return the cards of all served names."""
    context = request.app[CONTEXT]
    return json_response(ModelList(data=[_card(context, name) for name in context.models.names]))


async def show_model(request: web.Request) -> web.Response:
    """Return the card of one served name."""
    context = request.app[CONTEXT]
    name = request.match_info["model"]
    return json_response(_card(context, name))


async def health(request: web.Request) -> web.Response:
    """Return 200 while the engine can serve; 503 if it is dead, stuck or about to stop."""
    context = request.app[CONTEXT]
    context.check_accepting()
    context.engine.check_health()
    return web.Response()


async def version(_request: web.Request) -> web.Response:
    """Return the version of this program."""
    return json_response(VersionAnswer(version=__version__))


async def load(request: web.Request) -> web.Response:
    """Return the number of requests in flight."""
    return json_response(LoadAnswer(server_load=request.app[CONTEXT].engine.num_unfinished))


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics page in Prometheus' text format."""
    return web.Response(
        body=request.app[CONTEXT].metrics.render(), headers={"Content-Type": CONTENT_TYPE}
    )


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget all cached prefixes, on the device and below it; say whether they were.

    They are not while some request holds blocks, unless reset_running_requests=true has them
    preempted and computed again. (The reference's reset_external is implied.)
    """
    success = await request.app[CONTEXT].engine.reset_prefix_cache(
        reset_running_requests=_flag(request, "reset_running_requests")
    )
    return json_response(SuccessAnswer(success=success))


def _flag(request: web.Request, name: str) -> bool:
    """Return a yes or no of the query; False if it is not there."""
    value = request.query.get(name, "false")
    if not re.fullmatch("(?i)true|false|1|0", value):
        raise ApiError(f"{name} must be true or false, got {value[:80]!r}.", param=name)
    return value.lower() in ("true", "1")


def _card(context: ServerContext, name: str) -> ModelCard:
    model = context.models.find(name)
    lora = model.lora
    return ModelCard(
        id=name,
        created=model.created,
        root=context.engine.model_name if lora is None else lora.lora_path,
        parent=model.parent,
        # As in the reference, only of base models; an adapter's is its parent's.
        max_model_len=context.engine.max_model_len if lora is None else None,
        permission=[ModelPermission(id=f"modelperm-{context.fingerprint}", created=model.created)],
    )
