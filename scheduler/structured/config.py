"""`StructuredOutputsConfig`: what grammars may cost, and how JSON is written."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """Settings of structured outputs; the first two hold for requests that do not say so.

    Attributes:
      disable_any_whitespace: write JSON without white space.
      disable_additional_properties: objects have the properties that their schema names, only,
        unless it speaks of others; True, as in vLLM's default backend: models that may invent
        properties go on to do so.
      compile_timeout: seconds that one grammar may take to compile.
      max_size: bytes of the text of a schema, regular expression, grammar or list of choices.
      max_depth: levels of nesting of a schema.
      cache_size: compiled grammars that are kept for the next request.

    Raises: ValueError for a limit that is not positive.
    """

    disable_any_whitespace: bool = True
    disable_additional_properties: bool = True
    compile_timeout: float = 5.0
    max_size: int = 65536
    max_depth: int = 64
    cache_size: int = 128

    def __post_init__(self) -> None:
        for name in ("compile_timeout", "max_size", "max_depth", "cache_size"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"structured_outputs_config: {name}={getattr(self, name)} must be above 0."
                )
