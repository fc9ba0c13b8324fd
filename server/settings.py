"""`ServerSettings`: what the HTTP layer can be told, apart from the engine's own configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paged.scheduler.params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS, Pooling
from paged.server.observability import ObservabilitySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsSettings:
    """Which web pages may call the server, and how; "*" stands for all.

    Attributes:
      origins: such as "https://chat.example"; empty: none.
      methods, headers: that they may use.
      allow_credentials: let them send cookies and the like.
    """

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAModule:
    """An adapter to be served.

    Attributes:
      name: that requests call it by.
      path: of its files, or its id on the Hub.
      base_model_name: of the model that it changes, for its card; None: the served one's.
    """

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """How /v1/embeddings makes vectors of prompts.

    Attributes:
      pooling: see `PoolingParams`; None: as the model asks for, or "last" if it does not say.
      normalize: scale vectors to length 1.
    """

    pooling: Pooling | None = None
    normalize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP application.

    Attributes:
      served_model_names: names clients may use, the first is reported; empty: the engine's own.
      lora_modules: adapters that are served from the start.
      allow_runtime_lora_updating: let clients load and unload adapters.
      api_keys: accepted keys; empty: no key is needed.
      metrics_require_key: ask for the key at /metrics, too.
      cache_salt_per_key: keep the prefix caches of several keys apart, see `salts_by_key`.
      ui: serve the playground at `/` and what it shows of the engine.
      dev_mode: serve the routes that are for development only, such as /reset_prefix_cache.
      chat_template: Jinja source used instead of the checkpoint's.
      chat_template_content_format: what templates get of a message with parts: the list of them
        ("openai"), or their text ("string"); "auto" looks at the template.
      default_chat_template_kwargs: variables of templates that requests do not set.
      trust_request_chat_template: let requests bring their own template.
      max_stored_responses: most answers of /v1/responses that are kept for their successors; 0
        keeps none.
      enable_auto_tool_choice: let models decide about tool calls; None: where the format is known.
      tool_call_parser: format of the model's tool calls, a name of `TOOL_FORMATS`, "none", or
        "auto", which looks for it in the chat template.
      reasoning_parser: format of the model's reasoning, a name of `REASONING_FORMATS`, "auto", or
        None, which leaves it in the text.
      pooler_config: how embeddings are made.
      exclude_tools_when_tool_choice_none: keep tools out of the prompt where none is to be called.
      client_max_size: largest request body, bytes.
      body_timeout_seconds: longest time that a body may take to arrive.
      write_timeout_seconds: a client that reads nothing of its stream for so long is cut off.
      max_prompts: most prompts of one completion request.
      max_n, max_logprobs, max_stop_strings: most samples, alternatives per token and stop strings
        that a request may ask for.
      max_concurrent_streams: most open streams; None: no limit.
      max_requests_per_minute: of each API key; None: no limit.
      cors: which web pages may call the server.
      root_path: prefix that a proxy leaves in front of every path.
      request_id_headers: answer with X-Request-Id.
      sse_keep_alive_seconds: silence after which a stream gets a comment; 0: never.
      stream_interval: tokens per chunk of a stream, after the first.
      force_include_usage: report usage in every stream, chunk by chunk.
      return_tokens_as_token_ids: spell tokens of log probabilities `token_id:123`.
      response_role: of chat answers.
      override_generation_config: sampling defaults that win over the checkpoint's, by the names
        of generation_config.json; `max_new_tokens` also caps what requests ask for.
      log_requests: log id and parameters of each request (never its prompt).
      log_stats: log throughput and load every `log_stats_seconds`.
      log_stats_seconds: seconds between two such lines.
      observability: traces, the log of requests, profiles.
    """

    served_model_names: tuple[str, ...] = ()
    lora_modules: tuple[LoRAModule, ...] = ()
    allow_runtime_lora_updating: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    metrics_require_key: bool = False
    cache_salt_per_key: bool = True
    ui: bool = True
    dev_mode: bool = False
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "openai", "string"] = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    max_stored_responses: int = 1000
    enable_auto_tool_choice: bool | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    pooler_config: PoolerConfig = field(default_factory=PoolerConfig)
    exclude_tools_when_tool_choice_none: bool = False
    client_max_size: int = 16 << 20
    body_timeout_seconds: float = 60.0
    write_timeout_seconds: float = 300.0
    max_prompts: int = 1024
    max_n: int = MAX_N
    max_logprobs: int = MAX_LOGPROBS
    max_stop_strings: int = 4
    max_concurrent_streams: int | None = 8192
    max_requests_per_minute: int | None = None
    cors: CorsSettings = field(default_factory=CorsSettings)
    root_path: str = ""
    request_id_headers: bool = False
    sse_keep_alive_seconds: float = 0.0
    stream_interval: int = 1
    force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    response_role: str = "assistant"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    log_requests: bool = False
    log_stats: bool = True
    log_stats_seconds: float = 10.0
    observability: ObservabilitySettings = field(default_factory=ObservabilitySettings)

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
        for name, low, high in (
            ("max_stored_responses", 0, None),
            ("max_prompts", 1, None),
            ("max_n", 1, MAX_N),
            ("max_logprobs", 0, MAX_LOGPROBS),
            ("max_stop_strings", 1, MAX_STOP_STRINGS),
            ("max_concurrent_streams", 1, None),
            ("max_requests_per_minute", 1, None),
            ("stream_interval", 1, None),
        ):
            value = getattr(self, name)
            if value is not None and (value < low or (high is not None and value > high)):
                upper = "" if high is None else f" and at most {high}"
                raise ValueError(f"{name}={value} must be at least {low}{upper}.")
        reserved = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
        if taken := sorted(reserved & self.default_chat_template_kwargs.keys()):
            raise ValueError(
                f"default_chat_template_kwargs must not hold {', '.join(taken)}: requests have "
                "fields for them."
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(
                f"root_path={self.root_path!r} must start with a slash and not end with one."
            )
        for name, values in (
            ("api_keys", self.api_keys),
            ("served_model_names", self.served_model_names),
        ):
            if not all(values):
                # An empty key would let `Authorization: Bearer` with nothing behind it pass.
                raise ValueError(f"{name} must not hold an empty string.")
