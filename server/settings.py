"""`ServerSettings`: what the HTTP layer can be told, apart from the engine's own configuration."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP application.

    Attributes:
      served_model_names: names clients may use, the first is reported; empty: the engine's own.
      api_keys: accepted keys; empty: no key is needed.
      metrics_require_key: ask for the key at /metrics, too.
      cache_salt_per_key: keep the prefix caches of several keys apart, see `salts_by_key`.
      ui: serve the playground at `/` and what it shows of the engine.
      dev_mode: serve the routes that are for development only, such as /reset_prefix_cache.
      chat_template: Jinja source used instead of the checkpoint's.
      trust_request_chat_template: let requests bring their own template.
      max_stored_responses: most answers of /v1/responses that are kept for their successors; 0
        keeps none.
      enable_auto_tool_choice: let models decide about tool calls; None: where the format is known.
      tool_call_parser: format of the model's tool calls, a name of `TOOL_FORMATS`, "none", or
        "auto", which looks for it in the chat template.
      reasoning_parser: format of the model's reasoning, a name of `REASONING_FORMATS`, "auto", or
        None, which leaves it in the text.
      exclude_tools_when_tool_choice_none: keep tools out of the prompt where none is to be called.
      client_max_size: largest request body, bytes.
      log_requests: log id and parameters of each request (never its prompt).
      log_stats: log throughput and load every `log_stats_seconds`.
      log_stats_seconds: seconds between two such lines.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    metrics_require_key: bool = False
    cache_salt_per_key: bool = True
    ui: bool = True
    dev_mode: bool = False
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    max_stored_responses: int = 1000
    enable_auto_tool_choice: bool | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = False
    client_max_size: int = 16 << 20
    log_requests: bool = False
    log_stats: bool = True
    log_stats_seconds: float = 10.0

    @property
    def salts_by_key(self) -> bool:
        """Whether requests share cached prefixes only with those of the same key.

        Otherwise one tenant could tell from the time of a first token what another one has sent
        (CVE-2025-46570). A single key is a single tenant.
        """
        return self.cache_salt_per_key and len(set(self.api_keys)) > 1

    def __post_init__(self) -> None:
        if self.client_max_size < 1:
            raise ValueError(f"client_max_size={self.client_max_size} must be at least 1 byte.")
        if self.max_stored_responses < 0:
            raise ValueError(
                f"max_stored_responses={self.max_stored_responses} must not be negative."
            )
        for name, values in (
            ("api_keys", self.api_keys),
            ("served_model_names", self.served_model_names),
        ):
            if not all(values):
                # An empty key would let `Authorization: Bearer` with nothing behind it pass.
                raise ValueError(f"{name} must not hold an empty string.")
