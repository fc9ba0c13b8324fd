"""tmp"""
from paged.scheduler.block_pool import BlockPool
from paged.scheduler.simulator.config import SimulationConfig
from paged.scheduler.simulator.trace import Trace

def make_pool(config: SimulationConfig, trace: Trace) -> BlockPool:
    return BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching)
