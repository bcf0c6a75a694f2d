"""`data` and `clean`: the text, its tokens, and what is dropped."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flatout.config.section import Conflict, Name, Natural, Positive, Section

Format = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "warc", "smiles", "tokens"]


class SourceConfig(Section):
    """One of several sources of a mixture."""

    path: Name = Field(description="What `data.source` takes as a single text.")
    weight: Annotated[float, Field(gt=0.0, le=1000.0)] = Field(
        default=1.0,
        description="How often each training document is taken: 2 is twice, 0.25 a quarter of them, chosen by hash.",
    )
    field: Name | None = Field(default=None, description="Instead of data.field for this source.")
    format: Format | None = Field(default=None, description="Instead of data.format for this source.")
    document_start: Name | None = Field(default=None, description="Instead of data.document_start for this source.")


class DataConfig(Section):
    source: str | Annotated[list[Name | SourceConfig], Field(min_length=1)] | None = Field(
        default="shakespeare",
        description="Raw text: `shakespeare` (shipped), a file, a folder, `hf:NAME`, `-` (standard input), or a list.",
    )
    val_source: str | None = Field(
        default=None, description="Source of the validation text; null takes val_fraction of data.source."
    )
    folder: Name | None = Field(
        default=None,
        description="Folder of prepared token shards; null means data/SOURCE-TOKENIZER, filled on first use.",
    )
    tokenizer: str = Field(
        default="char", description="`char`, `bytes`, `gpt2`, or the path of a Hugging Face tokenizer.json."
    )
    unknown_characters: Literal["error", "drop", "replace"] = Field(
        default="error", description="What tokenizer `char` does with a character it has never seen."
    )
    format: Format | None = Field(default=None, description="Format of the source; null tells it by the file's name.")
    field: Name = Field(
        default="text", description="Field of a row that holds its text, nested as in `a.b`; `*` takes every element."
    )
    document_start: Name | None = Field(
        default=None,
        description="In text files, each line that begins with this, after spaces, begins a document; null has one.",
    )
    invalid_utf8: Literal["strict", "replace", "skip"] = Field(
        default="strict",
        description="Documents with bytes that are not UTF-8: list and leave out, repair with U+FFFD, or drop.",
    )
    split: Literal["contiguous", "document"] = Field(
        default="contiguous", description="Take validation from the end of the text, or choose whole documents by hash."
    )
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.1, description="Share of the text kept for validation."
    )
    shard_tokens: Annotated[int, Field(ge=1, le=2**40)] = Field(
        default=100_000_000, description="Tokens in a shard file."
    )
    packing: Literal["concat", "best_fit"] = Field(
        default="concat",
        description="Windows over the joined documents, or whole documents fitted into windows with little padding.",
    )
    documents: Literal["joined", "apart"] = Field(
        default="joined",
        description="Whether a token sees all of its window before it, or its own document alone, labels included.",
    )
    streaming: bool = Field(
        default=False, description="Train while reading data.source, without preparing shards first."
    )
    stride: Positive | None = Field(
        default=None, description="Tokens between window starts; null means the context, so no overlap."
    )


class CleanConfig(Section):
    min_characters: Natural = Field(default=0, description="Drop documents shorter than this; 0 keeps them.")
    max_characters: Annotated[int, Field(ge=1, le=2**22)] | None = Field(
        default=None, description="Drop documents longer than this."
    )
    exact_duplicates: bool = Field(default=False, description="Keep only the first of documents with the same text.")
    near_duplicates: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        default=None, description="Drop documents this similar to an earlier one (Jaccard of word 5-grams, by MinHash)."
    )
    languages: Annotated[list[Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]], Field(min_length=1)] | None = Field(
        default=None, description="Keep only documents in these languages, such as [en, de]."
    )
    repetition: bool = Field(default=False, description="Drop documents that repeat lines, paragraphs or word n-grams.")
    quality: bool = Field(
        default=False, description="Drop documents whose word lengths, symbols or lines are not those of prose."
    )
    blocked_urls: str | None = Field(
        default=None, description="File of domains, URLs or words, one a line, whose crawl pages are dropped."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_characters is not None and self.min_characters > self.max_characters:
            raise Conflict(
                f"min_characters {self.min_characters} is above max_characters {self.max_characters}",
                f"set clean.min_characters to at most {self.max_characters}, or clean.max_characters higher",
            )
        return self
