"""The verbs that use a trained model: eval, generate, chat, export, and merge of its adapters into its weights."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from flatout.words import Parser, add_base, add_model, check_model, converse

if TYPE_CHECKING:
    from flatout.api import LoadedModel


def evaluate(words: list[str]) -> int:
    parser = Parser("eval", "Measure a trained model on its validation text: loss, perplexity, bits per byte.")
    add_model(parser)
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="prepared shards of text to use instead of the run's own data; of a fine-tuned run also the folder of "
        "its own samples, where that is not found from here",
    )
    parser.add_argument("--split", choices=("val", "train"), default="val", help="which split to measure")
    parser.number("--tokens", 1, 2**40, help="measure this many tokens from the start")
    parser.flag("--json", "print the result as JSON")
    parsed, model = _parse(parser, words)
    from flatout import api

    result = api.evaluate(model, data=parsed.data, split=parsed.split, tokens=parsed.tokens)
    if parsed.json:
        print(json.dumps(vars(result)))
    else:
        bits = "" if result.bits_per_byte is None else f"  bits/byte {result.bits_per_byte:.4f}"
        print(f"{result.origin} on {result.tokens:,} {result.split} tokens:")
        print(f"loss {result.loss:.4f}  perplexity {result.perplexity:.3f}{bits}")
    return 0


def _parse(parser: Parser, words: list[str]) -> "tuple[argparse.Namespace, LoadedModel]":
    """The words, and the model that they name; nothing heavy is imported before they are understood."""
    parsed = parser.parse_words(words)
    check_model(parsed, parser.text_option)
    from flatout import api

    return parsed, api.load_model(parsed.run, device=parsed.device, best=not parsed.last, base=parsed.base)


# --- text -------------------------------------------------------------------------------------------------------------


def generate(words: list[str]) -> int:
    parser = Parser("generate", "Continue a prompt with a trained model, printed as it comes.")
    add_model(parser)
    parser.text_option = "--prompt"
    parser.add_argument("--prompt", default="\n", help="text to continue; default: a new line")
    parser.number("--top-k", 1, 2**31, help="sample among the K likeliest tokens")
    _add_sampling(parser, tokens=300, temperature=0.8)
    parser.flag("--interactive", "ask for prompts until end of input")
    parsed, model = _parse(parser, words)
    from flatout import api
    from flatout.observe.human import printable

    def answer(prompt: str) -> None:
        shown = prompt if prompt.strip() and not parsed.interactive else ""
        # the first piece shows that the prompt can be read
        for piece in api.generate(model, prompt, top_k=parsed.top_k, **_sampling(parsed)):
            print(shown + printable(piece), end="", flush=True)
            shown = ""
        print()

    if not parsed.interactive:
        answer(parsed.prompt)
        return 0
    return converse("type a prompt, end with Ctrl-D", lambda prompt: answer(prompt or "\n"))


def _add_sampling(parser: Parser, *, tokens: int, temperature: float, top_p: float | None = None) -> None:
    parser.number("--tokens", 1, 10_000_000, default=tokens, help=f"most tokens to write; default {tokens}")
    parser.number("--temperature", 0, 100.0, default=temperature, help=f"0 is greedy; default {temperature}")
    told = "sample among the likeliest tokens of this mass" + ("" if top_p is None else f"; default {top_p}")
    parser.number("--top-p", 0, 1.0, default=top_p, help=told)
    parser.number("--seed", 0, 2**63 - 1, default=0, help="the same seed repeats; default 0")


def _sampling(parsed: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(parsed, name) for name in ("tokens", "temperature", "top_p", "seed")}


def chat(words: list[str]) -> int:
    """Talks in the terminal, by the template that the model was taught with."""
    parser = Parser("chat", "Talk to a chat model: a fine-tuned run, or a Hugging Face folder.")
    add_model(parser)
    parser.text_option = "--message"
    parser.add_argument("--message", help="say this, print the answer and leave; default: ask until end of input")
    parser.add_argument("--system", help="what the conversation begins with, for models that take it")
    _add_sampling(parser, tokens=500, temperature=0.7, top_p=0.95)
    parsed, model = _parse(parser, words)
    from flatout import api
    from flatout.observe.human import printable

    if api.is_untaught(model):
        said = f"{model.origin} was never taught a chat template: it continues each message as bare text"
        print(f"note: {printable(said)}, without what was said before", file=sys.stderr)
    history = [] if parsed.system is None else [{"role": "system", "content": parsed.system}]

    def answer(message: str) -> None:
        if not message.strip():
            return
        said = ""
        asked = {"role": "user", "content": message}
        for piece in api.chat(model, [*history, asked], **_sampling(parsed)):
            print(printable(piece), end="", flush=True)
            said += piece
        print()
        history.extend([asked, {"role": "assistant", "content": said}])

    if parsed.message is not None:
        answer(parsed.message)
        return 0
    return converse("type a message, end with Ctrl-D", answer)


# --- folders for others -----------------------------------------------------------------------------------------------


def _writing_parser(verb: str, about: str) -> Parser:
    parser = Parser(verb, about)
    parser.add_argument("run", help="a run, checkpoint or adapter folder")
    parser.add_argument("folder", help="new folder to write")
    parser.flag("--last", "use the newest checkpoint instead of the best")
    add_base(parser)
    parser.set_defaults(device="cpu")
    return parser


def export(words: list[str]) -> int:
    parser = _writing_parser("export", "Write a trained model as a folder for Hugging Face tools, with its tokenizer.")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of the weights; default: fp32, but bf16 where adapters are merged into them, as `flatout merge` has it",
    )
    parser.flag("--adapter", "adapters alone, as PEFT's folder; default: inside the weights")
    parsed, model = _parse(parser, words)
    from flatout import api

    notices: list[str] = []
    target = api.export(model, parsed.folder, dtype=parsed.dtype, adapter=parsed.adapter, notice=notices.append)
    print("\n".join([f"wrote {target}", *(f"note: {message}" for message in notices)]))
    return 0


def merge(words: list[str]) -> int:
    """Writes one folder of weights, and says what the rounding left of the update."""
    about = "Write a fine-tuned model as one Hugging Face folder, its adapters inside the weights."
    parser = _writing_parser("merge", about)
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="of the weights; default bf16, as `flatout export` has it for a run with adapters",
    )
    parser.flag("--json", "print the result as JSON")
    parsed, model = _parse(parser, words)
    from flatout import api

    told: list[str] = []
    done = api.merge(model, parsed.folder, dtype=parsed.dtype, notice=told.append)
    total, difference = done.report.total, done.difference
    if parsed.json:
        body = {"folder": str(done.folder), "kept": total.kept, "lost": total.lost, "unchanged": total.unchanged}
        body |= {"relative_update": total.relative_update, "logits_relative": difference.relative, "notes": told}
        print(json.dumps({**body, "logits_largest": difference.largest, "same_choice": difference.same_choice}))
        return 0
    print(f"wrote {done.folder}, in {parsed.dtype}")
    print(
        f"the update is {total.relative_update:.2%} of the weights it changes; {total.kept:.1%} of it survived the "
        f"rounding, {total.unchanged:.1%} of those weights are as before"
    )
    print(
        f"logits on a short text: {difference.relative:.2%} apart from the adapters', the largest by "
        f"{difference.largest:.3g}; the likeliest token is the same at {difference.same_choice:.1%} of its places"
    )
    if total.kept < 0.9:
        told.append(
            f"much of the update is lost in {parsed.dtype}: write it with --dtype fp32, or keep the adapters apart"
        )
    for message in told:
        print(f"note: {message}")
    return 0
