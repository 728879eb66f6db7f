"""Compare what a group of ranks computes with the whole model, before it serves.

The leader computes six tokens with the model as it was loaded, and all ranks compute them again
once it is cut. So a family whose plan does not say all that its code does is refused, not run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from motet_kernels.recurrent.packed_rows import PackedRows
from motet_llm.attention.options import AttentionOptions
from motet_llm.attention.paged import RotatesHeads
from motet_llm.models.recurrent import Recurrent
from motet_shared.errors import ConfigError, MotetError

TOKENS = 6
# Deviation of logits, relative to their norm, by which sums in another order may differ.
BOUND = {torch.float32: 1e-4}
COARSE_BOUND = 0.05  # for 16-bit types


class OneSequence(RotatesHeads):
    """Attend causally within one short sequence that begins with the first token.

    heads: key/value heads of each layer that has attended; a latent is one.
    """

    def __init__(self) -> None:
        self.heads: dict[int, int] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions,
    ) -> Tensor:
        self.heads[layer] = key.shape[1]
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores_1HNN = (query @ key.mT * scale).float()
        if options.softcap is not None:
            scores_1HNN = (scores_1HNN / options.softcap).tanh() * options.softcap
        later_NN = torch.ones(scores_1HNN.shape[-2:], dtype=torch.bool).triu(1)
        scores_1HNN = scores_1HNN.masked_fill(later_NN, -torch.inf)
        if options.sinks_H is not None:
            sinks = options.sinks_H.float().view(1, -1, 1, 1).expand(*scores_1HNN.shape[:3], 1)
            scores_1HNN = torch.cat((scores_1HNN, sinks), dim=-1)
        weights = scores_1HNN.softmax(-1)[..., : key.shape[2]].to(value.dtype)
        return (weights @ value).transpose(1, 2).contiguous()

    def attend_latent(
        self, layer: int, query_NHC: Tensor, latent_NC: Tensor, value_dim: int, scale: float
    ) -> Tensor:
        """Attend as `StepLayout.attend_latent` does. Return `[N, H, value_dim]`."""
        keys_11NC = latent_NC.view(1, 1, *latent_NC.shape)
        query_1HNC = query_NHC.transpose(0, 1).unsqueeze(0)
        values = keys_11NC[..., :value_dim].expand(-1, query_1HNC.shape[1], -1, -1)
        keys = keys_11NC.expand(-1, query_1HNC.shape[1], -1, -1)
        attended = self.attend(layer, query_1HNC, keys, values, scale, AttentionOptions())
        self.heads[layer] = 1
        return attended[0]

    def recurrent(
        self, layer: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
    ) -> Recurrent:
        """Return the states of a sequence that begins."""
        states = tuple(torch.zeros(1, *shape, dtype=dtype) for shape in shapes)
        return Recurrent(states, PackedRows(torch.zeros(1, dtype=torch.long), [0, TOKENS]))


@torch.inference_mode()
def first_logits(model: PreTrainedModel) -> tuple[Tensor, dict[int, int]]:
    """Return the logits `[6, V]` of a model that is not packed yet, and its key heads by layer.

    All ranks call it together once the model is cut.
    """
    layout = OneSequence()
    vocab: int = model.config.get_text_config().vocab_size
    output = model(
        input_ids=(torch.arange(TOKENS) * 7 % vocab).unsqueeze(0),
        position_ids=torch.arange(TOKENS).unsqueeze(0),
        use_cache=False,
        logits_to_keep=torch.arange(TOKENS),
        layout=layout,
    )
    logits: Tensor = output.logits[0].float()
    return logits, layout.heads


def logits_of_cut(model: PreTrainedModel, settings: str) -> Tensor:
    """Return the logits `[6, V]` of a cut model, whose ranks all call this.

    Raises ConfigError if the model's code needs what other ranks hold. settings: for the message.
    """
    try:
        return first_logits(model)[0]
    except MotetError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{settings}: model_type={model.config.model_type!r} fails without what other ranks hold"
            f" ({error!r}); give another kind of parallelism, or one rank"
        ) from error


def check(model: PreTrainedModel, whole_NV: Tensor, cut_NV: Tensor, settings: str) -> None:
    """Raise ConfigError if the ranks' logits are not those of the whole model.

    settings: the degrees, for the message.
    """
    norm_N = whole_NV.norm(dim=-1)
    norm_N[norm_N == 0] = 1.0  # of a token whose embedding is zero, as that of padding may be
    deviation_N = (cut_NV - whole_NV).norm(dim=-1) / norm_N
    # The median, because a token whose experts tie may be routed either way.
    deviation = float(deviation_N.median())
    if not deviation <= BOUND.get(model.dtype, COARSE_BOUND):
        raise ConfigError(
            f"{settings}: model_type={model.config.model_type!r} computes other logits in a group"
            f" (they deviate by {deviation:.2g}): its plan does not say all that its code does;"
            " give another kind of parallelism, or one rank"
        )
