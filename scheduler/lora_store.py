"""`LoRAStore`: adapters in host memory, by name and path; read again when they are gone.

Adapters are read on the thread of whoever asks for one, never by the engine's. An unfinished
request keeps its adapter: what is dropped here, or taken out, it can still be computed with.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from paged.scheduler.lora_request import LoRARequest


class AdapterWeights(Protocol):
    """An adapter's arrays on the host, opaque to the scheduler.

    Attributes:
      layers: the matrices of each layer that it changes.
      digest: of them; equal digests are equal adapters.
    """

    @property
    def layers(self) -> Mapping[str, Any]:
        """The matrices."""

    @property
    def digest(self) -> str:
        """Of the matrices."""


class Adapter(NamedTuple):
    """An adapter in host memory.

    Attributes:
      name: what it is called.
      weights: its arrays.
    """

    name: str
    weights: AdapterWeights

    @property
    def digest(self) -> str:
        """Tells contents apart; equal ones share a place on the device."""
        return self.weights.digest

    @property
    def key(self) -> tuple[str, str]:
        """Name and digest, which the prefix cache tells KV apart by."""
        return self.name, self.weights.digest


class LoRAStore:
    """Reads adapters and keeps those that were used last; thread-safe.

    Args:
      read: the weights of a path, checked against the model; raises `AdapterError`.
      capacity: most adapters that are kept.
    """

    def __init__(self, read: Callable[[str], AdapterWeights], capacity: int) -> None:
        self._read = read
        self._capacity = capacity
        self._named: dict[str, LoRARequest] = {}
        self._kept: OrderedDict[tuple[str, str], Adapter] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # one at a time: the disk is one

    def add(self, request: LoRARequest) -> None:
        """Read an adapter's files, even if they have been read, and list it by its name.

        What was listed under the name before is replaced; its unfinished requests go on with it.

        Raises:
          AdapterError: if it cannot be used; nothing has changed then.
        """
        with self._reading:
            adapter = Adapter(request.lora_name, self._read(request.lora_path))
        with self._lock:
            self._named[request.lora_name] = request
            self._keep(request, adapter)

    def remove(self, name: str) -> bool:
        """Take an adapter off the list and out of memory; return whether it was listed."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == name]:
                del self._kept[key]
            return self._named.pop(name, None) is not None

    def listed(self) -> list[LoRARequest]:
        """Return what was added, in order."""
        with self._lock:
            return list(self._named.values())

    def get(self, request: LoRARequest) -> Adapter:
        """Return an adapter, listed or not, reading it if it is not in memory.

        Raises:
          AdapterError: if it cannot be used.
        """
        adapter = self._find(request)
        if adapter is not None:
            return adapter
        with self._reading:
            adapter = self._find(request)  # somebody else may have read it meanwhile
            if adapter is None:
                adapter = Adapter(request.lora_name, self._read(request.lora_path))
                with self._lock:
                    self._keep(request, adapter)
        return adapter

    async def get_async(self, request: LoRARequest) -> Adapter:
        """Do what `get` does; the event loop does not wait for files."""
        adapter = self._find(request)
        return await asyncio.to_thread(self.get, request) if adapter is None else adapter

    def _find(self, request: LoRARequest) -> Adapter | None:
        key = request.lora_name, request.lora_path
        with self._lock:
            adapter = self._kept.get(key)
            if adapter is not None:
                self._kept.move_to_end(key)
            return adapter

    def _keep(self, request: LoRARequest, adapter: Adapter) -> None:
        key = request.lora_name, request.lora_path
        self._kept[key] = adapter
        self._kept.move_to_end(key)
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
