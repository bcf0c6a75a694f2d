"""llama.cpp itself, in a child process: log-probabilities of the next token after every beginning of some ids.

This file is also the child's program: it reads a request and answers in JSON. It is a process of its own because
llama.cpp aborts on a file that it does not like, prints as it likes and keeps threads. Keys and values are cached in
F32.

Trap: the server does not report a token whose bytes end within a character. So each answer is one token that a bias
makes certain; probabilities are those before the bias.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PATIENCE = 1800.0  # seconds


def log_probabilities(
    path: Path, ids: Sequence[int], *, plain: int, most: int, greedy: int = 0, text: str | None = None
) -> tuple[list[dict[int, float]], int | None]:
    """After each beginning of `ids`, the `most` likeliest tokens with their log-probabilities.

    `greedy`: goes on with as many likeliest tokens. `text`: asks for what comes after it, too, and returns the number
    of its tokens. `plain` is a token of whole characters.
    """
    from flatout.errors import CheckpointError  # here: the child may not find the package

    request = {"path": str(path), "ids": list(ids), "plain": plain, "most": most, "greedy": greedy, "text": text}
    command = [sys.executable, "-P", __file__]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # its threads would spin between tokens
    try:
        done = subprocess.run(
            command, input=json.dumps(request), env=env, capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
        found, count = json.loads(done.stdout.splitlines()[-1])
        return [dict(one) for one in found], count
    except (subprocess.SubprocessError, IndexError, ValueError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise CheckpointError(
            f"llama.cpp cannot run {path}: {said[-1] if said else error!r:.300}", "report it with the model's settings"
        ) from error


def _answer(request: dict[str, Any]) -> tuple[list[list[tuple[int, float]]], int | None]:
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = request["path"]
    params.n_ctx = 2 * (len(request["ids"]) + request["greedy"]) + 256
    params.n_parallel, params.warmup, params.verbosity, params.fit_params = 1, False, 0, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.n_gpu_layers = 0
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to fp16
    server = xllamacpp.Server(params)
    asked = {"n_predict": 1, "n_probs": request["most"], "cache_prompt": True, "logit_bias": [[request["plain"], 1e4]]}
    found: list[list[tuple[int, float]]] = []

    def ask(prompt: list[int] | str) -> int:
        answer = server.handle_completions({**asked, "prompt": prompt})
        if "choices" not in answer:
            raise RuntimeError(str(answer))
        likeliest = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found.append([(one["id"], one["logprob"]) for one in likeliest])
        return answer["usage"]["prompt_tokens"]

    ids: list[int] = []
    for place in range(len(request["ids"]) + request["greedy"]):
        ids.append(request["ids"][place] if place < len(request["ids"]) else found[-1][0][0])
        ask(ids)
    return found, None if request["text"] is None else ask(request["text"])


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
