"""The verbs after fine-tuning: chat with a model, and merge its adapters into its weights."""

import json
import sys

from flatout.words import Parser, add_base, add_model, check_model, converse, number_between


def chat(words: list[str]) -> int:
    """Talks in the terminal, by the template that the model was taught with."""
    parser = Parser("chat", "Talk to a chat model: a fine-tuned run, or a Hugging Face folder.")
    add_model(parser)
    parser.add_argument("--message", help="say this, print the answer and leave; default: ask until end of input")
    parser.add_argument("--system", help="what the conversation begins with, for models that take it")
    parser.add_argument(
        "--tokens", type=number_between(int, 1, 10_000_000), default=500, help="most tokens of an answer; default 500"
    )
    parser.add_argument(
        "--temperature", type=number_between(float, 0, 100), default=0.7, help="0 is greedy; default 0.7"
    )
    parser.add_argument("--top-p", type=number_between(float, 0, 1), default=0.95, help="default 0.95")
    parser.add_argument(
        "--seed", type=number_between(int, 0, 2**63 - 1), default=0, help="the same seed repeats; default 0"
    )
    parsed = parser.parse_words(words)
    check_model(parsed)
    from flatout import api
    from flatout.observe.human import printable

    model = api.load_model(parsed.run, device=parsed.device, best=not parsed.last, base=parsed.base)
    if api.is_untaught(model):
        said = f"{model.origin} was never taught a chat template: it continues each message as bare text"
        print(f"note: {printable(said)}, without what was said before", file=sys.stderr)
    history = [] if parsed.system is None else [{"role": "system", "content": parsed.system}]
    settings = {name: getattr(parsed, name) for name in ("tokens", "temperature", "top_p", "seed")}

    def answer(message: str) -> None:
        if not message.strip():
            return
        said = ""
        for piece in api.generate(model, api.chat_prompt(model, message, history), bare=False, **settings):
            print(printable(piece), end="", flush=True)
            said += piece
        print()
        history.extend([{"role": "user", "content": message}, {"role": "assistant", "content": said}])

    if parsed.message is not None:
        answer(parsed.message)
        return 0
    return converse("type a message, end with Ctrl-D", answer)


def merge(words: list[str]) -> int:
    """Writes one folder of weights, and says what the rounding left of the update."""
    parser = Parser("merge", "Write a fine-tuned model as one Hugging Face folder, its adapters inside the weights.")
    parser.add_argument("run", help="a run, checkpoint or adapter folder")
    parser.add_argument("folder", help="new folder to write")
    parser.add_argument("--last", action="store_true", help="use the newest checkpoint instead of the best")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="of the weights; default bf16, as `flatout export` has it for a run with adapters",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_base(parser)
    parser.set_defaults(device="cpu")
    parsed = parser.parse_words(words)
    check_model(parsed)
    from flatout import api

    model = api.load_model(parsed.run, device="cpu", best=not parsed.last, base=parsed.base)
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
