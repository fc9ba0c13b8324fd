"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, where the environment allows them."""

from aiohttp import web

from paged.server.context import CONTEXT
from paged.server.errors import ApiError
from paged.server.protocol import LoadAdapterRequest, UnloadAdapterRequest, decode_body, read_json
from paged.server.settings import LoRAModule


async def load_adapter(http_request: web.Request) -> web.Response:
    """Read an adapter's files and serve it under a name of its own."""
    context = http_request.app[CONTEXT]
    context.check_accepting()
    request = decode_body(await read_json(http_request), LoadAdapterRequest)
    if not request.lora_name or not request.lora_path:
        raise ApiError(
            "Both 'lora_name' and 'lora_path' must be provided.",
            type="InvalidUserInput",
            param="lora_path" if request.lora_name else "lora_name",
        )
    if request.is_3d_lora_weight:
        raise ApiError(
            "is_3d_lora_weight is not supported by this version. Leave it out, and store the "
            "adapter's matrices expert by expert.",
            param="is_3d_lora_weight",
        )
    module = LoRAModule(name=request.lora_name, path=request.lora_path)
    await context.models.load(module, in_place=bool(request.load_inplace))
    return web.Response(text=f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def unload_adapter(http_request: web.Request) -> web.Response:
    """Serve an adapter no more."""
    context = http_request.app[CONTEXT]
    request = decode_body(await read_json(http_request), UnloadAdapterRequest)
    if not request.lora_name:
        raise ApiError(
            "'lora_name' needs to be provided to unload a LoRA adapter.",
            type="InvalidUserInput",
            param="lora_name",
        )
    await context.models.unload(request.lora_name)
    return web.Response(text=f"Success: LoRA adapter '{request.lora_name}' removed successfully.")
