"""A packed model, ready to run: outer weights in memory, layers as the stream brings them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shared.device import CPU
from shared.health import EngineHealth
from shared.model.attention import PART_TOKENS
from shared.model.batch import TokenBatch
from shared.model.embedding import EmbeddingFile
from shared.model.layers import KeyValues, LayerWeights, decoder_layer, norm
from shared.model.mlp import Linear
from shared.model.rotary import RotationOfRows, RotationOnDemand, rotation
from shared.model.spec import ModelSpec, Rope
from shared.pack.reader import Pack
from shared.quant.products import linear
from shared.streaming.copies import Copies
from shared.streaming.plan import Residency
from shared.streaming.stream import LayerStream
from shared.tensors import on_device


class Model:
    """Runs passes. Used by one thread."""

    def __init__(
        self,
        pack: Pack,
        residency: Residency,
        outer: Mapping[str, Tensor] | None = None,
        *,
        output: Linear | None = None,
        verify_always: bool = False,
        copies: Copies | None = None,
    ) -> None:
        """Loads outer weights and resident layers, and starts reading the others.

        Args:
            outer: the outer weights, where another model has loaded the same ones.
            output: multiplies by something like the output matrix in its place; for drafts.
            verify_always: compare a streamed layer's digest whenever it is read.
            copies: what brings layers to the device that computes; None where it is the CPU.

        Raises:
            DataLossError, UnavailableError: the pack cannot be read as it was written.
            UnsupportedModelError: the model cannot be on that device.
        """
        self.spec = pack.spec
        self.dtype = pack.scheme.compute_dtype
        self.device = copies.device if copies else CPU
        """Where the model computes."""
        self.outer = on_device(pack.read_outer(), self.device) if outer is None else outer
        self._final_norm = self.outer["final_norm.weight"]
        self._output = output_matrix(pack.spec, self.outer)
        self._output_in_its_place = output
        self._embedding_file = (
            None
            if pack.spec.tied_embeddings
            else EmbeddingFile(pack.outer_path, pack.outer_layout.data_start, pack.embedding)
        )
        self.copies = copies
        self._stream = LayerStream(pack, residency, verify_always=verify_always, copies=copies)
        self.experts = self._stream.experts
        """Where the layers' experts come from, in a model that has some."""
        self.health = EngineHealth()
        """Of the engine that runs this model."""

    @property
    def streamed_bytes(self) -> int:
        """Bytes of streamed layers that passes have used so far."""
        return self._stream.streamed_bytes

    def begin(self, batch: TokenBatch) -> Pass:
        """Starts a pass: embeds the tokens of a batch."""
        return Pass(self, batch)

    def walk(self) -> Iterator[tuple[int, LayerWeights]]:
        """Every layer in order, for one pass; see `LayerStream.walk`."""
        for layer, weights in self._stream.walk():
            self.health.progress()
            yield layer, weights
        self.health.recovered()

    def probe(self) -> None:
        """Reads every streamed layer, a row of the embedding, and experts that were lost, to see whether that works.

        Raises:
            DataLossError, UnavailableError: it does not.
        """
        self.embed(torch.zeros(1, dtype=torch.int64))
        if self.experts:
            self.experts.bring_lost()
        for _ in self.walk():
            pass

    def forward(self, batch: TokenBatch, kv: KeyValues) -> Tensor:
        """A whole pass; returns the last layer's output for every token, [tokens, hidden_size]."""
        current = self.begin(batch)
        for layer, weights in self.walk():
            current.compute(layer, weights, kv)
        return current.hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding, [tokens, hidden_size].

        Args:
            token_ids: int64 [tokens], in the host's memory.
        """
        rows = (
            self._embedding_file.rows(token_ids).to(self.device)
            if self._embedding_file
            else self._output[token_ids.to(self.device)]
        )
        scale = self.spec.multipliers.embedding
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=self.dtype)  # rounded, as it was in training

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output matrix: [rows, hidden_size] -> float32 [rows, vocab_size], in the host's memory."""
        hidden = hidden.to(self.device)
        logits = self._unscaled_logits(norm(self.spec, hidden, self._final_norm)).float()
        if self.spec.multipliers.logits != 1.0:
            logits.mul_(self.spec.multipliers.logits)
        cap = self.spec.logit_soft_cap
        return (logits if cap is None else logits.div_(cap).tanh_().mul_(cap)).cpu()

    def _unscaled_logits(self, normed: Tensor) -> Tensor:
        return self._output_in_its_place(normed) if self._output_in_its_place else linear(normed, self._output)

    def finish(self) -> None:
        """Returns when everything is computed that was asked for. A CPU is done when asking for it returns."""
        if self.copies:
            self.copies.record().wait()

    def close(self) -> None:
        """Stops reading ahead."""
        self._stream.close()
        if self._embedding_file:
            self._embedding_file.close()


def output_matrix(spec: ModelSpec, outer: Mapping[str, Tensor]) -> Tensor:
    """What turns features into logits, [vocab_size, hidden_size]; of tied embeddings, these."""
    return outer["embedding.weight" if spec.tied_embeddings else "output.weight"]


class Pass:
    """The state of one pass between layers: what every token's features are by now."""

    def __init__(self, model: Model, batch: TokenBatch) -> None:
        self.batch = batch
        self.hidden = model.embed(batch.token_ids)
        """[tokens, hidden_size]."""
        self._spec = model.spec
        self._experts = model.experts
        self._dtype = model.dtype
        self._rotations = self._rotate()

    def compute(self, layer: int, weights: LayerWeights, kv: KeyValues) -> None:
        """Takes all tokens through one layer."""
        rotation = self._rotations[self._spec.ropes[layer]]
        decoder_layer(self._spec, layer, weights, self.hidden, rotation, kv, self._experts)

    def keep(self, counts: Sequence[int]) -> None:
        """Drops all tokens but the first of each sequence, as many as `counts` says; see `TokenBatch.keep`."""
        self.batch, rows = self.batch.keep(counts)
        self.hidden = self.hidden[rows]
        self._rotations = self._rotate()

    def _rotate(self) -> dict[Rope | None, RotationOfRows]:
        """Tables for all layers, unless there are so many tokens that these would be large."""
        kind = rotation if len(self.hidden) <= PART_TOKENS else RotationOnDemand
        positions = self.batch.positions.to(self.hidden.device)
        return {rope: kind(rope, positions, self._dtype) for rope in set(self._spec.ropes)}

    @property
    def last_hidden(self) -> Tensor:
        """Features of each sequence's last token, [sequences, hidden_size]."""
        return self.hidden[self.batch.last_rows]
