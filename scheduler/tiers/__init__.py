"""KV tiers below the device: evicted blocks in host memory and on disk, and their way back up."""
