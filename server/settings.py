"""`ServerSettings`: what the HTTP layer can be told, apart from the engine's own configuration."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP application.

    Attributes:
      served_model_names: names clients may use, the first is reported; empty: the engine's own.
      api_keys: accepted keys; empty: no key is needed.
      metrics_require_key: ask for the key at /metrics, too.
      chat_template: Jinja source used instead of the checkpoint's.
      trust_request_chat_template: let requests bring their own template.
      client_max_size: largest request body, bytes.
      log_requests: log id and parameters of each request (never its prompt).
      log_stats: log throughput and load every `log_stats_seconds`.
      log_stats_seconds: seconds between two such lines.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    metrics_require_key: bool = False
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    client_max_size: int = 16 << 20
    log_requests: bool = False
    log_stats: bool = True
    log_stats_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.client_max_size < 1:
            raise ValueError(f"client_max_size={self.client_max_size} must be at least 1 byte.")
        for name, values in (
            ("api_keys", self.api_keys),
            ("served_model_names", self.served_model_names),
        ):
            if not all(values):
                # An empty key would let `Authorization: Bearer` with nothing behind it pass.
                raise ValueError(f"{name} must not hold an empty string.")
