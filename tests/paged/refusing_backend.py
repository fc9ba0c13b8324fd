"""An attention backend that serves no call, to see what the op says then."""


def unsupported(q, kv_cache) -> str | None:
    del kv_cache
    return f"head_dim={q.shape[2]} is not a head_dim it knows"
