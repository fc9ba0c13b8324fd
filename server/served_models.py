"""`ServedModels`: the names that requests may call a model by, its own and those of adapters."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged.models.errors import AdapterError, AdapterNotFoundError
from paged.scheduler.lora_request import LoRARequest
from paged.scheduler.params import ParameterError
from paged.server.errors import ApiError
from paged.server.settings import LoRAModule

if TYPE_CHECKING:
    from paged.scheduler.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

# Type of errors whose cause is what the client has sent, with the reference's name.
_INVALID = "InvalidUserInput"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a request's `model` stands for.

    Attributes:
      name: that its answers carry.
      lora: adapter that the engine computes with; None is the base model.
      parent: of an adapter, the name of the model that it changes.
      created: when it was first served, Unix seconds.
    """

    name: str
    lora: LoRARequest | None = None
    parent: str | None = None
    created: int


class ServedModels:
    """The base model under its names, and the adapters by theirs (mutable).

    Args:
      engine: computes with the adapters.
      base_names: of the base model; answers carry the first.
    """

    def __init__(self, engine: "AsyncEngine", base_names: Sequence[str]) -> None:
        self._engine = engine
        self._base_names = tuple(base_names)
        self._base = ServedModel(name=self._base_names[0], created=int(time.time()))
        self._adapters: dict[str, ServedModel] = {}
        # Between the check of a name and its entry files are read: one change at a time.
        self._changing = asyncio.Lock()

    @property
    def base(self) -> ServedModel:
        """The base model."""
        return self._base

    @property
    def names(self) -> tuple[str, ...]:
        """All names: the base model's, then the adapters' in the order of their loading."""
        return *self._base_names, *self._adapters

    def find(self, name: str | None) -> ServedModel:
        """Return what a name stands for; no name is the base model.

        Raises: ApiError 404 if nothing is served under it.
        """
        if not name or name in self._base_names:
            return self._base
        if name in self._adapters:
            return self._adapters[name]
        raise ApiError(
            f"The model `{name}` does not exist. Valid aliases: {', '.join(self.names)}.",
            status=404,
            param="model",
        )

    async def load_all(self, modules: Iterable[LoRAModule]) -> None:
        """Load the adapters that are served from the start.

        Raises: ValueError if one of them cannot be; it names the adapter.
        """
        for module in modules:
            try:
                await self.load(module)
            except ApiError as error:
                message = f"The adapter '{module.name}' cannot be served: {error.message}"
                raise ValueError(message) from error

    async def load(self, module: LoRAModule, *, in_place: bool = False) -> None:
        """Read an adapter and serve it under its name.

        Args:
          module: the adapter.
          in_place: replace the one of this name, if there is one; requests that have begun go on
            with what was there.

        Raises: ApiError 400 if the name is taken, 404 if there is no adapter at the path, 500 if
          the engine cannot use it; nothing has changed then.
        """
        if module.name in self._base_names:
            raise ApiError(
                f"The name '{module.name}' is that of the base model; give the adapter another.",
                type=_INVALID,
                param="lora_name",
            )
        async with self._changing:
            if module.name in self._adapters and not in_place:
                raise ApiError(
                    f"The lora adapter '{module.name}' has already been loaded. If you want to "
                    "load the adapter in place, set 'load_inplace' to True.",
                    type=_INVALID,
                    param="lora_name",
                )
            lora = LoRARequest(lora_name=module.name, lora_path=module.path)
            try:
                await self._engine.add_lora(lora)
            except AdapterNotFoundError as error:
                raise ApiError(str(error), status=404, param="lora_path") from error
            except (AdapterError, OSError, ParameterError) as error:
                raise ApiError(str(error), status=500, param="lora_path") from error
            self._adapters[module.name] = ServedModel(
                name=module.name,
                lora=lora,
                parent=module.base_model_name or self._base.name,
                created=int(time.time()),
            )
        logger.info("Loaded LoRA adapter '%s' from %s.", module.name, module.path)

    async def unload(self, name: str) -> None:
        """Serve an adapter no more; requests that have begun go on with it.

        Raises: ApiError 404 if there is none of this name.
        """
        async with self._changing:
            if name not in self._adapters:
                raise ApiError(
                    f"The lora adapter '{name}' cannot be found.", status=404, param="lora_name"
                )
            del self._adapters[name]
            self._engine.remove_lora(name)
        logger.info("Unloaded LoRA adapter '%s'.", name)
