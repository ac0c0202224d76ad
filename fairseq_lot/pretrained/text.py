"""From a typed sentence to a model's pieces and back, as the corpus of its data folder was made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq.data import Dictionary
from sacremoses import MosesDetokenizer
from sentencepiece import SentencePieceProcessor

from fairseq_lot.corpus.encode import MODEL_NAME
from fairseq_lot.corpus.tokenise import tokenise_lines
from fairseq_lot.errors import InputError


@dataclass(frozen=True)
class Text:
    """How a corpus is encoded, by Moses tokens, lower case and sentencepiece, and decoded.

    Attributes:
        pieces: the sentencepiece model.
        source, target: languages.
        tokenised: sentences come as Moses tokens already, and translations stay such tokens.
    """

    pieces: SentencePieceProcessor
    source: str
    target: str
    tokenised: bool = False

    @classmethod
    def of(cls, data: str | Path, source: str, target: str, *, tokenised: bool = False) -> "Text":
        """The encoding of a data folder.

        Raises:
            InputError: its sentencepiece model is missing or damaged.
        """
        path = Path(data) / MODEL_NAME
        if not path.is_file():
            raise InputError(f"{data} has no {MODEL_NAME}; copy the model that encoded its text there")
        try:
            pieces = SentencePieceProcessor(model_file=str(path))
        except Exception as error:  # whatever reading garbage raises
            raise InputError(f"{path} is not a sentencepiece model: {error}") from error
        return cls(pieces, source, target, tokenised)

    def encode(self, sentences: Sequence[str]) -> list[list[str]]:
        """The pieces of each sentence, without an end of sentence; none for a blank one."""
        tokens = sentences if self.tokenised else tokenise_lines(sentences, self.source)
        return [self.pieces.encode(line, out_type=str) for line in tokens]

    def decode(self, pieces: str) -> str:
        """The sentence that these pieces, separated by spaces, spell."""
        tokens = self.pieces.decode(pieces.split())
        return tokens if self.tokenised else MosesDetokenizer(self.target).detokenize(tokens.split())


def indices(pieces: Sequence[str], dictionary: Dictionary) -> torch.Tensor:
    """``(len + 1,)``: the symbols of the pieces and the end of sentence."""
    return torch.tensor([*map(dictionary.index, pieces), dictionary.eos()])
