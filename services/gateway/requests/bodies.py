"""The bodies of `/v1/completions` and `/v1/chat/completions`.

Strict: a number is no string, true is no number, and a field that we do not know is refused by name, so that a typing
error in `max_tokens` is not an answer of another length. Fields that OpenAI documents and that change nothing here are
accepted and ignored.
"""

from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.types import FailFast

from services.gateway.requests import unsupported
from services.gateway.requests.choices import check_choices
from services.gateway.requests.fields import Content, LogitBias, Prompts, StopStrings, StopTokenIds, Text
from services.gateway.requests.problems import problem, to_invalid_request
from shared.errors import InvalidRequest
from shared.sampling import NUMERIC_PARAMS, ParamSpec

MAX_MESSAGES = 10_000
MAX_CACHE_SALT = 256
ROLES = ("system", "developer", "user", "assistant")
ROLES_OF_TOOLS = ("tool", "function")

MAX_TIMEOUT_S = 86_400.0
Timeout = Annotated[float | None, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]

SPECS: dict[str, ParamSpec] = {spec.name: spec for spec in NUMERIC_PARAMS}
SPECS["max_completion_tokens"] = SPECS["max_tokens"]


class StreamOptions(BaseModel):
    """Of a streaming request."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    """One more chunk with the usage before `[DONE]`."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """Accepted and ignored: chunks carry no padding."""

    @model_validator(mode="before")
    @classmethod
    def _drop_excess(cls, data: Any) -> Any:
        return unsupported.with_one_unknown(data, cls.model_fields) if isinstance(data, dict) else data


class GenerationBody(BaseModel):
    """What both endpoints share. Null means the default."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    neutral: ClassVar[unsupported.Neutral] = {}

    model: Text | None = None
    """None: the model that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    priority: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    """Deterministic search for the most probable outputs, with `best_of` (or `n`) beams. A stream gets each result
    whole, at the end."""
    length_penalty: float | None = None
    logit_bias: LogitBias = ()
    stop: StopStrings = ()
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool | None = None
    cache_salt: Annotated[Text, Field(max_length=MAX_CACHE_SALT)] | None = None
    """Cached prompts are shared only among requests with the same salt."""

    queue_timeout_s: Timeout = None
    """Most seconds until it is computed for the first time; then it ends with the finish reason `timeout`."""
    first_token_timeout_s: Timeout = None
    timeout_s: Timeout = None
    background: bool | None = None
    """Go on for the resume window when the client leaves."""

    user: Text | None = None
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        rest, asking = unsupported.without_neutral(data, cls.neutral)
        if asking is not None:
            raise unsupported.unsupported(asking)
        return unsupported.with_one_unknown(rest, cls.model_fields)

    @field_validator(*SPECS, check_fields=False)
    @classmethod
    def _check_range(cls, value: float | None, info: ValidationInfo) -> float | None:
        spec = SPECS[str(info.field_name)]
        if value is None or spec.accepts(value):
            return value
        wanted = f"must be {spec.low:g}" if spec.low == spec.high else f"must be in {spec.range}"
        raise problem(f"{wanted}, got {_shown(value)}. {spec.doc}")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only with stream = true", param="stream_options")
        most = self.token_limit
        if most is not None and self.number("min_tokens") > most:
            message = f"min_tokens: {self.min_tokens} is more than the {most} of max_tokens"
            raise InvalidRequest(message, param="min_tokens")
        check_choices(self)
        return self

    @property
    def num_choices(self) -> int:
        """Results per prompt."""
        return int(self.number("n"))

    @property
    def num_candidates(self) -> int:
        """Sequences per prompt that are sampled, or beams."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def token_limit(self) -> int | None:
        """Most output tokens; None fills the context."""
        return self.max_tokens

    @property
    def deadlines(self) -> tuple[float, float, float]:
        """Seconds to the first admission, the first token and the end; 0: none."""
        return (self.queue_timeout_s or 0.0, self.first_token_timeout_s or 0.0, self.timeout_s or 0.0)

    def number(self, name: str) -> Any:
        """The value of a numeric parameter, or its default from the table."""
        value = getattr(self, name)
        return SPECS[name].default if value is None else value


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    neutral: ClassVar[unsupported.Neutral] = unsupported.COMPLETION

    prompt: Prompts
    add_special_tokens: bool | None = None
    """Whether text prompts get the tokens that the tokenizer puts around a text (BOS); default true."""


class ChatMessage(BaseModel):
    """One message: text only, for now."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: str
    content: Content = Field(default=None, validate_default=True)  # absent is refused like null
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("role") in ROLES_OF_TOOLS:
            raise problem("messages of tools are not supported yet", at=".role")
        rest, asking = unsupported.without_neutral(data, unsupported.MESSAGE)
        if asking is not None:
            raise problem("not supported yet", at=f".{asking}")
        return unsupported.with_one_unknown(rest, cls.model_fields)

    @field_validator("role")
    @classmethod
    def _check_role(cls, value: str) -> str:
        if value not in ROLES:
            raise problem(f"must be one of {', '.join(ROLES)}")
        return value

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: `developer` is OpenAI's newer name of `system`."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content} | ({"name": self.name} if self.name is not None else {})


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    neutral: ClassVar[unsupported.Neutral] = unsupported.CHAT

    messages: Annotated[list[ChatMessage], FailFast()]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer; default: unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """Go on with the last message, which is the assistant's, instead of a new one."""
    parallel_tool_calls: Any = None

    @field_validator("messages", mode="before")
    @classmethod
    def _check_count(cls, value: Any) -> Any:
        if isinstance(value, list) and not 1 <= len(value) <= MAX_MESSAGES:
            raise problem(f"must hold 1 to {MAX_MESSAGES} messages, got {len(value)}")
        return value

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens: differs from max_completion_tokens", param="max_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message: contradicts add_generation_prompt"
            raise InvalidRequest(message, param="continue_final_message")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            message = "continue_final_message: the last message must be the assistant's"
            raise InvalidRequest(message, param="continue_final_message")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Body = TypeVar("Body", bound=GenerationBody)


def read_body(kind: type[Body], data: Any) -> Body:
    """`data`, the decoded JSON of a request, as a checked body.

    Raises:
        InvalidRequest: names the first field that is wrong.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise to_invalid_request(error) from None


def _shown(value: float) -> str:
    """A number of bounded length."""
    return f"{value}" if abs(value) < 1e25 or value != value else "a larger number"
