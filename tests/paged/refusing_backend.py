"""An attention backend that serves no call, to see what the op says then."""

from paged.attention_call import AttentionCall


def unsupported(call: AttentionCall) -> str | None:
    return f"head_dim={call.head_dim} is not a head_dim it knows"
