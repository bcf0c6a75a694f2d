"""The verbs that use a trained model: eval, generate, export."""

import json
from typing import TYPE_CHECKING

from flatout.words import Parser, add_base, add_model, check_model, converse, number_between

if TYPE_CHECKING:
    pass


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
    parser.add_argument("--tokens", type=number_between(int, 1, 2**40), help="measure this many tokens from the start")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parsed = parser.parse_words(words)
    check_model(parsed)
    from flatout import api

    model = api.load_model(parsed.run, device=parsed.device, best=not parsed.last, base=parsed.base)
    result = api.evaluate(model, data=parsed.data, split=parsed.split, tokens=parsed.tokens)
    if parsed.json:
        print(json.dumps(vars(result)))
    else:
        bits = "" if result.bits_per_byte is None else f"  bits/byte {result.bits_per_byte:.4f}"
        print(f"{result.origin} on {result.tokens:,} {result.split} tokens:")
        print(f"loss {result.loss:.4f}  perplexity {result.perplexity:.3f}{bits}")
    return 0


def generate(words: list[str]) -> int:
    parser = Parser("generate", "Continue a prompt with a trained model, printed as it comes.")
    add_model(parser)
    parser.add_argument("--prompt", default="\n", help="text to continue; default: a new line")
    parser.add_argument(
        "--tokens", type=number_between(int, 1, 10_000_000), default=300, help="how many tokens; default 300"
    )
    parser.add_argument(
        "--temperature", type=number_between(float, 0, 100), default=0.8, help="0 is greedy; default 0.8"
    )
    parser.add_argument("--top-k", type=number_between(int, 1, 2**31), help="sample among the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=number_between(float, 0, 1), help="sample among the likeliest tokens of this mass"
    )
    parser.add_argument(
        "--seed", type=number_between(int, 0, 2**63 - 1), default=0, help="the same seed repeats; default 0"
    )
    parser.add_argument("--interactive", action="store_true", help="ask for prompts until end of input")
    parsed = parser.parse_words(words)
    check_model(parsed)
    from flatout import api
    from flatout.observe.human import printable

    model = api.load_model(parsed.run, device=parsed.device, best=not parsed.last, base=parsed.base)

    def answer(prompt: str) -> None:
        settings = {name: getattr(parsed, name) for name in ("tokens", "temperature", "top_k", "top_p", "seed")}
        shown = prompt if prompt.strip() and not parsed.interactive else ""
        for piece in api.generate(model, prompt, **settings):  # the first piece shows that the prompt can be read
            print(shown + printable(piece), end="", flush=True)
            shown = ""
        print()

    if not parsed.interactive:
        answer(parsed.prompt)
        return 0
    return converse("type a prompt, end with Ctrl-D", lambda prompt: answer(prompt or "\n"))


def export(words: list[str]) -> int:
    parser = Parser("export", "Write a trained model as a folder for Hugging Face tools, with its tokenizer.")
    parser.add_argument("run", help="a run, checkpoint or adapter folder")
    parser.add_argument("folder", help="new folder to write")
    parser.add_argument("--last", action="store_true", help="use the newest checkpoint instead of the best")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of the weights; default: fp32, but bf16 where adapters are merged into them, as `flatout merge` has it",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="adapters alone, as PEFT's folder; default: inside the weights"
    )
    add_base(parser)
    parser.set_defaults(device="cpu")
    parsed = parser.parse_words(words)
    check_model(parsed)
    from flatout import api

    model = api.load_model(parsed.run, device="cpu", best=not parsed.last, base=parsed.base)
    notices: list[str] = []
    target = api.export(model, parsed.folder, dtype=parsed.dtype, adapter=parsed.adapter, notice=notices.append)
    print(f"wrote {target}")
    for message in notices:
        print(f"note: {message}")
    return 0
