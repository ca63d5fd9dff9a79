"""The shapes of well-known models, by name: what memory and time follow from.

Sources: Llama Team 2024, The Llama 3 Herd of Models (arXiv 2407.21783), table 3, for 8B, 70B and
405B; the model card of Llama 3.2 1B for the smallest. The paper rounds the vocabulary to 128,000;
the released models have 128,256. The config.json of the released Llama 2 7B (arXiv 2307.09288) for
llama2-7b, whose heads all have keys and values of their own.
"""

from dataclasses import dataclass

from ..model import Config


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama kind. dim: size of a token's vector; ffn_dim: of the feed-forward."""

    name: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """Of one layer: attention, feed-forward and two norms."""
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.dim * self.ffn_dim + 2 * self.dim

    @property
    def parameters(self) -> int:
        """Of the whole model, as `cpref.model.Decoder` builds it.

        Input and output embeddings are two matrices there. The released 1B model shares one, and so
        has 0.26 billion fewer.
        """
        return self.layers * self.layer_parameters + 2 * self.vocab * self.dim + self.dim

    @property
    def config(self) -> Config:
        """The same as the configuration of a `cpref.model.Decoder`."""
        return Config(
            vocab=self.vocab,
            layers=self.layers,
            width=self.dim,
            heads=self.heads,
            kv_heads=self.kv_heads,
            hidden=self.ffn_dim,
            rope_base=500_000.0,
        )


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("1b", 16, 2048, 32, 8, 64, 8192, 128_256),
        ModelShape("8b", 32, 4096, 32, 8, 128, 14336, 128_256),
        ModelShape("70b", 80, 8192, 64, 8, 128, 28672, 128_256),
        ModelShape("405b", 126, 16384, 128, 8, 128, 53248, 128_256),
        ModelShape("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32_000),
    )
}


def model_shape(name: str) -> ModelShape:
    """The model of that name, in either case. ValueError, with the known ones, if there is none."""
    shape = MODELS.get(name.lower())
    if shape is None:
        raise ValueError(f"model is {name!r}; it must be one of {', '.join(MODELS)}")
    return shape
