"""`data`, `clean` and `chat`: the text, its tokens, what is dropped, and what a model is fine-tuned on."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from flatout.config.section import Conflict, Name, Positive, Section, Share

Format = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "warc", "smiles", "tokens"]


Fields = Name | Annotated[list[Name], Field(min_length=1)]


class _Validated(Section):
    if TYPE_CHECKING:  # a field here would come before all others
        validation: str | float

    @property
    def val_source(self) -> str | None:
        """The source of the validation data, where it is none of the training data."""
        return self.validation if isinstance(self.validation, str) else None

    @property
    def val_fraction(self) -> float:
        """The share that is held out; 0 where validation has a source of its own."""
        return self.validation if isinstance(self.validation, float) else 0.0


class SourceConfig(Section):
    """One of several sources of a mixture."""

    path: Name
    """What `data.source` takes as a single text."""
    weight: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """How often each training document is taken: 2 is twice, 0.25 a quarter of them, chosen by hash."""
    format: Format | None = None
    """Instead of data.format for this source."""


class DataConfig(_Validated):
    source: str | Annotated[list[Name | SourceConfig], Field(min_length=1)] | None = "shakespeare"
    """Raw text: `shakespeare` (shipped), a file, a folder, `hf:NAME`, `-` (standard input), or a list."""
    validation: Name | Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of the text that is kept for validation, or another source for it."""
    folder: Name | None = None
    """Folder of prepared token shards; null means data/SOURCE-TOKENIZER, filled on first use."""
    tokenizer: str = "char"
    """`char`, `bytes`, `gpt2`, `bpe-512` (learned from the text, of any size), or a tokenizer.json's path."""
    unknown_characters: Literal["error", "drop", "replace"] = "error"
    """What tokenizer `char` does with a character it has never seen."""
    format: Format | None = None
    """Format of the source; null tells it by the file's name."""
    field: Fields = "text"
    """Field of a row that holds its text, nested as in `a.b` or `a.*.b`; of several, the first that has text."""
    document_start: Name | None = None
    """In text files, each line that begins with this, after spaces, begins a document; null has one."""
    invalid_utf8: Literal["strict", "replace", "skip"] = "strict"
    """Documents with bytes that are not UTF-8: list and leave out, repair with U+FFFD, or drop."""
    max_documents: Positive | None = None
    """Take at most this many documents of each source, the first ones; null takes all."""
    max_tokens: Positive | None = None
    """Take the first documents of each source up to this many tokens, cutting plain text there; null takes all."""
    max_bytes: Positive | None = None
    """Take the first documents of each source up to this many bytes, cutting plain text there; null takes all."""
    split: Literal["contiguous", "document"] = "contiguous"
    """Take validation from the end of the text, or choose whole documents by hash."""
    packing: Literal["concat", "reshuffle", "best_fit"] = "concat"
    """Windows over the joined documents, joined anew in every epoch, or whole ones fitted with little padding."""
    documents: Literal["joined", "apart"] = "joined"
    """Whether a token sees all of its window before it, or its own document alone, labels included."""
    streaming: bool = False
    """Train while reading data.source, without preparing shards first."""
    stride: Positive | None = None
    """Tokens between window starts; null means the context, so no overlap."""


class CleanConfig(Section):
    drop: list[Literal["short", "exact_duplicates", "near_duplicates", "repetition", "quality"]] = Field(default=[])
    """Drop documents below 200 characters, like an earlier one (near: 80%), that repeat themselves, or are no prose."""
    languages: Annotated[list[Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]], Field(min_length=1)] | None = None
    """Keep only documents in these languages, such as [en, de]."""


class ChatConfig(_Validated):
    source: str | None = None
    """File or folder of conversations or instructions to fine-tune on; null trains on plain text."""
    validation: Name | Share = 0.05
    """Share of the rows that is held out for evaluation, or a file or folder to evaluate on."""
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt-completion", "text"] = "auto"
    """How a row tells a conversation; auto looks at the first rows."""
    fields: list[Name] = Field(default=[])
    """Columns under other names, such as [prompt=question, completion=answer]."""
    template: Name = "model"
    """Chat template: the model's own, chatml, plain, none, or a file of Jinja."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What has a label: assistant turns, the last of them, or every token."""
    max_tokens: Positive | None = None
    """Most tokens of a sample; longer ones are cut; null means model.context, which they never exceed."""
    packing: bool = True
    """Several samples in a row, none of which sees another; false pads each to a row."""
    batch_samples: Positive = 8
    """Samples per optimizer step."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for pair in self.fields:
            name, sign, column = pair.partition("=")
            if not (name and sign and column):
                raise Conflict(
                    f"fields has {pair!r}, which is no name with a column", "write chat.fields=[prompt=question]"
                )
        return self
