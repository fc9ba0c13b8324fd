"""Real engines: the demo model in float32, and the tiny llama with its byte tokenizer."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paged.scheduler.block_pool import BlockPool
from paged.scheduler.config import EngineConfig
from paged.scheduler.engine import Engine
from paged.scheduler.eviction.policies import make_policy
from paged.scheduler.loading import LoadedEngine, load_engine
from paged.scheduler.scheduler import Scheduler
from paged.scheduler.tiers.manager import TierManager
from paged.scheduler.tiers.transfer import TierTransfer
from paged.server.settings import ServerSettings
from tests.e2e.live_server import live_server


@pytest.fixture(scope="session")
def smollm_golden(data_dir: Path) -> dict:
    return json.loads((data_dir / "golden" / "smollm2-135m-instruct.json").read_text())


@pytest.fixture(scope="session")
def smollm(demo_model_path: Path) -> Iterator[LoadedEngine]:
    """The demo model in float32, loaded and compiled once for all tests."""
    config = EngineConfig(
        dtype="float32",
        # The native kernels, where there is a compiler; test_golden_xla.py has the others.
        attention_backend="auto",
        linear_backend="auto",
        max_model_len=1536,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        block_size=16,
        num_gpu_blocks_override=512,
        # So that the runner can move blocks; its own tiers are hardly used.
        kv_offloading_size=0.01,
        compilation_cache_dir=None,
    )
    loaded = load_engine(str(demo_model_path), config, progress=False)
    yield loaded
    loaded.engine.close()


class EngineMaker:
    """Makes engines that share a loaded runner but have a scheduler of their own."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        self._tiers: list[TierManager] = []

    def __call__(
        self,
        *,
        num_blocks: int | None = None,
        token_budget: int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = False,
        eviction: str = "lru",
        async_scheduling: bool = True,
        make_tiers: Callable[[TierTransfer], TierManager] | None = None,
        **settings: Any,
    ) -> Engine:
        """Return an engine; what is not given is the loaded one's.

        Args:
          num_blocks, token_budget, max_model_len: no more than the loaded engine's.
          enable_prefix_caching, eviction, async_scheduling: as in `EngineConfig`.
          make_tiers: gets the runner's side of the tiers and returns them.
          **settings: of the scheduler.
        """
        shared = self._loaded.engine
        pool = BlockPool(
            num_blocks or shared.scheduler.pool.num_usable + 1,
            self._loaded.config.block_size,
            enable_prefix_caching,
            policy=make_policy(eviction),
        )
        tiers = make_tiers(shared.runner._block_mover.transfer) if make_tiers else None
        if tiers is not None:
            self._tiers.append(tiers)
        scheduler = Scheduler(
            pool=pool,
            max_num_seqs=shared.scheduler.max_num_seqs,
            max_num_batched_tokens=token_budget or shared.scheduler.max_num_batched_tokens,
            max_model_len=max_model_len or self._loaded.max_model_len,
            tiers=tiers,
            **settings,
        )
        return Engine(
            scheduler=scheduler,
            runner=shared.runner,
            tokenizer=shared.tokenizer,
            processor=shared.processor,
            async_scheduling=async_scheduling,
            grammars=shared.grammars,
            tiers=tiers,
        )

    def close(self) -> None:
        """Stop the threads of all tiers."""
        for tiers in self._tiers:
            tiers.close()


@pytest.fixture
def make_engine(smollm: LoadedEngine) -> Iterator[EngineMaker]:
    """Return engines of the demo model that share its loaded runner."""
    make = EngineMaker(smollm)
    yield make
    make.close()


@pytest.fixture(scope="session")
def tiny_model(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of the tiny llama with the byte tokenizer."""
    golden = data_dir / "golden" / "tiny"
    folder = tmp_path_factory.mktemp("tiny-llama")
    for source in (golden / "llama", golden / "tokenizer"):
        for file in source.iterdir():
            if file.name != "expected.json":
                shutil.copy(file, folder / file.name)
    return folder


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Settings for the tiny llama: few small buckets, compiled once for all tests."""
    return EngineConfig(
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=8,
        num_gpu_blocks_override=65,
        async_scheduling=True,
        compilation_cache_dir=str(tmp_path_factory.mktemp("xla")),
    )


@pytest.fixture(scope="session")
def tiny_url(tiny_model: Path, tiny_config: EngineConfig) -> Iterator[str]:
    """The URL of a server of the tiny llama, whose answers are noise."""
    settings = ServerSettings(
        served_model_names=("tiny",), tool_call_parser="hermes", dev_mode=True, log_stats=False
    )
    with live_server(str(tiny_model), tiny_config, settings) as url:
        yield url


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tiny_config: EngineConfig) -> Iterator[LoadedEngine]:
    """The tiny llama, loaded and compiled once for all tests that can share it."""
    loaded = load_engine(str(tiny_model), tiny_config, progress=False)
    yield loaded
    loaded.engine.close()


@pytest.fixture
def make_tiny(tiny: LoadedEngine) -> Callable[..., Engine]:
    """Return engines that share the loaded tiny runner but have a scheduler of their own."""

    def make(
        *, num_blocks: int = 65, async_scheduling: bool = True, has_grammars: bool = True
    ) -> Engine:
        shared = tiny.engine
        scheduler = Scheduler(
            pool=BlockPool(num_blocks, 8),
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len=256,
        )
        return Engine(
            scheduler=scheduler,
            runner=shared.runner,
            tokenizer=shared.tokenizer,
            processor=shared.processor,
            async_scheduling=async_scheduling,
            grammars=shared.grammars if has_grammars else None,
        )

    return make


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    """Chromium without a window."""
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("missing tool: selenium, of the extra `browser`")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("missing tool: chromium and chromedriver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    yield browser
    browser.quit()
