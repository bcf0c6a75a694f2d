"""Bodies of requests: the fields of OpenAI's interface, their values, and what is refused.

Contract: a field that would change the text and is not supported is refused by name, and so is an unknown field. Fields
that change nothing are ignored. A mistake raises `Refused`, which becomes OpenAI's error object.
"""

import dataclasses
import secrets
from typing import Any

from flatout.files import parse_json

MOST_TEXTS = 128  # of one request: prompts times n
_MOST_LOGPROBS = 20  # what the engine gives
_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "parallel_tool_calls"),
}
# Fields that are not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("audio", "reasoning_effort", "verbosity", "web_search_options"), ()),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
_WHOLE = {
    "n": (1, MOST_TEXTS),
    "max_tokens": (1, 2**31),
    "max_completion_tokens": (1, 2**31),
    "seed": (-(2**63), 2**63 - 1),
    "top_k": (-1, 2**31),
    "top_logprobs": (0, _MOST_LOGPROBS),
}
_REAL = {"temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0.01, 100)}
_SWITCHES = ("stream", "ignore_eos")
_OTHERS = ("model", "stop", "stop_token_ids", "stream_options", "logprobs")
_OF_TEXT = {*_WHOLE, *_REAL, *_SWITCHES, *_OTHERS, "prompt"} - {"max_completion_tokens", "top_logprobs"}
_OF_CHAT = {*_WHOLE, *_REAL, *_SWITCHES, *_OTHERS, "messages"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        status: int = 400,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code
        self.status, self.headers = status, headers or {}

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request in our words. `work` is what the engine's process gets."""

    chat: bool
    model: str | None
    stream: bool
    usage: bool  # at the end of a stream
    running_usage: bool  # in every chunk of it
    texts: int
    work: dict[str, Any]


def read_request(raw: bytes, *, chat: bool) -> Asked:
    try:
        body = parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error!s:.200}") from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    body = {name: value for name, value in body.items() if name not in _IGNORED and value is not None}
    for name, neutral in _NEUTRAL.items():
        if body.pop(name, None) not in (None, *neutral):
            raise Refused(f"{name} is not supported; leave it out", name, "unsupported_parameter")
    known = _OF_CHAT if chat else _OF_TEXT
    if unknown := next((name for name in body if name not in known), None):
        raise Refused(f"{unknown[:100]!r} is not a field of this request", unknown[:100], "unknown_parameter")
    whole = {name: _number(body, name, int, *limits) for name, limits in _WHOLE.items()}
    real = {name: _number(body, name, float, *limits) for name, limits in _REAL.items()}
    for name in _SWITCHES:
        _check(isinstance(body.get(name, False), bool), name, "true or false")
    _check(isinstance(body.get("model", ""), str), "model", "a text")
    options = body.get("stream_options", {})
    switches = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
    right = isinstance(options, dict) and switches >= options.keys()
    right = right and all(isinstance(one, bool) for one in options.values())
    _check(right, "stream_options", f"an object with {', '.join(sorted(switches))}, each true or false")
    messages, prompts = (_messages(body), []) if chat else (None, _prompts(body))
    n = whole["n"] or 1
    texts = n * max(1, len(prompts))
    if texts > MOST_TEXTS:
        raise Refused(f"{texts} texts in one request; at most {MOST_TEXTS}", "n")
    count = whole["max_completion_tokens"] or whole["max_tokens"] or (None if chat else 16)
    work = {
        "stream": body.get("stream", False),
        "messages": messages,
        "prompts": prompts,
        "n": n,
        "count": count,
        "stop": _stop(body),
        "stop_ids": _ids(body.get("stop_token_ids", []), "stop_token_ids", most=64),
        "ignore_eos": body.get("ignore_eos", False),
        "logprobs": _logprobs(body, whole["top_logprobs"], chat=chat),
        "sampling": {
            "temperature": 1.0 if real["temperature"] is None else real["temperature"],
            "top_p": real["top_p"],
            "min_p": real["min_p"],
            "repetition_penalty": real["repetition_penalty"] or 1.0,
            "top_k": whole["top_k"] if (whole["top_k"] or 0) > 0 else None,
            "seed": secrets.randbits(62) if whole["seed"] is None else whole["seed"],
        },
    }
    usage = options.get("include_usage", False)
    running = options.get("continuous_usage_stats", False)
    return Asked(chat, body.get("model"), work["stream"], usage, usage and running, texts, work)


def _check(right: bool, name: str, rule: str) -> None:
    if not right:
        raise Refused(f"{name} must be {rule}", name)


def _number(body: dict[str, Any], name: str, kind: type, low: float, high: float) -> Any:
    value = body.get(name)
    if value is not None:
        types = (int,) if kind is int else (int, float)
        right = type(value) in types and low <= value <= high  # a NaN is in no range
        _check(right, name, f"{'a whole number' if kind is int else 'a number'} from {low:,} to {high:,}")
    return value


def _ids(value: Any, name: str, most: int) -> list[int]:
    right = isinstance(value, list) and len(value) <= most and all(type(id) is int and id >= 0 for id in value)
    _check(right, name, "a list of token ids")
    return value


def _stop(body: dict[str, Any]) -> list[str]:
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    right = isinstance(stops, list) and len(stops) <= 4
    right = right and all(isinstance(one, str) and 0 < len(one) <= 200 for one in stops)
    _check(right, "stop", "a text or up to 4 texts, of 1 to 200 characters each")
    return stops


def _logprobs(body: dict[str, Any], top: int | None, *, chat: bool) -> int | None:
    if not chat:
        return _number(body, "logprobs", int, 0, _MOST_LOGPROBS)
    asked = body.get("logprobs", False)
    _check(isinstance(asked, bool), "logprobs", "true or false")
    if top is not None and not asked:
        raise Refused("top_logprobs needs logprobs to be true", "top_logprobs")
    return (top or 0) if asked else None


def _prompts(body: dict[str, Any]) -> list[str | list[int]]:
    value, rule = body.get("prompt"), "a text, token ids, or a list of texts or of lists of token ids"
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value:
        raise Refused(f"prompt must be {rule}", "prompt")
    for prompt in value:
        if not isinstance(prompt, str):
            _check(isinstance(prompt, list) and bool(prompt), "prompt", rule)
            _ids(prompt, "prompt", len(prompt))
    return value


def _messages(body: dict[str, Any]) -> list[dict[str, str]]:
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise Refused("messages must be a list of messages with role and content", "messages")
    return [_message(one, f"messages[{place}]") for place, one in enumerate(value)]


def _message(one: Any, where: str) -> dict[str, str]:
    _check(isinstance(one, dict), where, "an object with role and content")
    for name in one:
        if name not in ("role", "content", "name") and one[name]:
            raise Refused(f"{where} has {name[:100]!r}, which is not supported", where, "unsupported_parameter")
    role, content = one.get("role"), one.get("content")
    _check(isinstance(role, str) and role in _ROLES, f"{where}.role", f"one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        for part in content:
            right = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            _check(right, f"{where}.content", "a text, or parts of type text")
        content = "".join(part["text"] for part in content)
    _check(isinstance(content, str), f"{where}.content", "a text, or parts of type text")
    return {"role": _ROLES[role], "content": content}
