"""Draft with Medusa heads, each of which predicts another position from one hidden state.

(Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads".) Head `i` consists of layers `x + silu(W x + b)` and a matrix that maps to the vocabulary, and
predicts the token `i + 2` positions after the one whose last hidden state it reads. A chain of the
likeliest token of each head is verified, not a tree.

A folder has config.json and safetensors with the names of Medusa's own heads (`0.0.linear.weight`,
`0.1.weight`), or with those that vLLM gives them (`blocks.0.layers.0.weight`, `lm_heads.0.weight`,
optionally below `medusa_heads.`).

Shapes: B requests, X hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels.linear.linear import Linear
from motet_kernels.linear.pack import pack_linear
from motet_llm.config import MOST_DRAFTED, EngineConfig
from motet_llm.engine.model_runner import Forward, ModelRunner
from motet_llm.engine.request import Request
from motet_llm.engine.sampler import Sampled, choose
from motet_llm.grammar.token_mask import TokenMask
from motet_llm.scheduling.work import Work
from motet_llm.weights.tensor_files import TensorFiles
from motet_models.checkpoints import check_weights
from motet_shared.errors import ConfigError, InternalError

from .draft_request import DraftRequest

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Head(nn.Module):
    """Compute residual layers, then a matrix that maps to the vocabulary."""

    def __init__(self, layers: Sequence[Linear], lm_head: Linear):
        super().__init__()
        self.layers, self.lm_head = nn.ModuleList(layers), lm_head

    def forward(self, hidden_BX: Tensor) -> Tensor:
        """Return logits `[B, V]`."""
        for layer in self.layers:
            hidden_BX = hidden_BX + F.silu(layer(hidden_BX))
        logits: Tensor = self.lm_head(hidden_BX)
        return logits


@dataclass(slots=True, frozen=True)
class HiddenState:
    """Hold the hidden state of the token at `position` of its request."""

    hidden_X: Tensor
    position: int


class MedusaDrafts:
    """Draft for an engine whose model is run by `target`.

    Raises ConfigError if the heads belong to another model.
    """

    needs_model = True
    catch_up_tokens = 0

    def __init__(self, config: EngineConfig, target: ModelRunner):
        self._target = target
        self.heads = _load(config.speculate, target)
        self._hidden_states: dict[Request, HiddenState] = {}
        self._draft_requests: dict[Request, DraftRequest] = {}

    def catch_up_for(self, _request: Request) -> int:
        """Return 0: the model has computed all that the heads need."""
        return 0

    def observe(self, works: Sequence[Work], forward: Forward, sampled: Sampled) -> None:
        """Keep the hidden state that produced the last accepted token of each request of a step."""
        drawing = [work for work in works if work.draws]
        if not drawing:
            return
        rows, start = [], 0
        for work, agreed in zip(drawing, sampled.agreed, strict=True):
            rows.append(start + agreed)
            start += 1 + len(work.draft)
        places = forward.draws_R[torch.tensor(rows, device=forward.draws_R.device)]
        for work, agreed, hidden_X in zip(
            drawing, sampled.agreed, forward.hidden_ND[places], strict=True
        ):
            _, end = work.span
            self._hidden_states[work.request] = HiddenState(
                hidden_X, end - len(work.draft) + agreed - 1
            )

    @torch.inference_mode()
    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Return drafts of up to the wanted number of tokens, at most one per head.

        Requests whose last hidden state is unknown get none.
        """
        ready = [
            (r, count, s)
            for r, count in wanted
            if (s := self._hidden_states.get(r)) and s.position == r.num_computed - 1
        ]
        active = [self._prepare(request, count) for request, count, _ in ready]
        rows = list(range(len(active)))
        hidden_BX = torch.stack([s.hidden_X for _, _, s in ready]) if ready else torch.empty(0)
        all_requests = active
        for head in self.heads:
            if not active:
                break
            mask = TokenMask(active, self._target.vocab, self._target.device)
            mask.compute()
            tokens = choose(head(hidden_BX[rows]), active, mask).tolist()
            continues = [
                token >= 0 and one.extend(token) for one, token in zip(active, tokens, strict=True)
            ]
            rows = [row for row, on in zip(rows, continues, strict=True) if on]
            active = [one for one, on in zip(active, continues, strict=True) if on]
        return {
            draft_request.target: draft_request.draft
            for draft_request in all_requests
            if draft_request.draft
        }

    def _prepare(self, request: Request, wanted: int) -> DraftRequest:
        if (draft_request := self._draft_requests.get(request)) is None:
            draft_request = self._draft_requests[request] = DraftRequest(request)
        draft_request.synchronize(wanted)
        return draft_request

    def forget(self, request: Request) -> None:
        """Free what is kept for a request that has ended."""
        self._hidden_states.pop(request, None)
        self._draft_requests.pop(request, None)

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError if anything is kept for a request that is not in `requests`."""
        if gone := (self._hidden_states.keys() | self._draft_requests.keys()) - requests:
            raise InternalError(f"the heads keep {len(gone)} requests that are gone")


# -------------------------------------------------------------------------------------------------------------- loading
def are_heads(folder: Path) -> bool:
    """Return True if a folder holds Medusa heads.

    Raises ConfigError if its config.json cannot be read.
    """
    config = _config(folder)
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error}; copy it again") from error
    return found if isinstance(found, dict) else {}


def _load(given: str, target: ModelRunner) -> nn.ModuleList:
    """Return the heads of a folder.

    Raises ConfigError that names the folder and what is missing, left over or of another model.
    """
    folder, folder_name = Path(given), f"speculate={given!r}"
    config = _config(folder)
    count = config.get("medusa_num_heads", config.get("num_heads"))
    depth = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
    if (
        not isinstance(count, int)
        or not 1 <= count <= MOST_DRAFTED
        or not isinstance(depth, int)
        or depth < 0
    ):
        raise ConfigError(
            f"{folder_name}: config.json has {count!r} heads of {depth!r} layers; give 1 to {MOST_DRAFTED}"
        )
    check_weights(folder)
    files = TensorFiles(folder)
    if not files.left:
        raise ConfigError(
            f"{folder_name}: no *.safetensors; save the heads as such, other formats can run code while they load"
        )
    reader = _HeadReader(folder_name, files, target)
    heads = nn.ModuleList(reader.head(number, depth) for number in range(count))
    if files.left:
        raise ConfigError(
            f"{folder_name}: config.json knows nothing of {', '.join(sorted(files.left)[:4])}; correct either"
        )
    return heads


class _HeadReader:
    """Read heads from files under either naming, and pack them like the model's own matrices."""

    def __init__(self, folder_name: str, files: TensorFiles, target: ModelRunner):
        self._source, self._files, self._target = folder_name, files, target
        self._hidden = target.model.config.get_text_config().hidden_size
        self._prefix = next(
            (
                p
                for p in ("medusa_heads.", "medusa_head.")
                if any(n.startswith(p) for n in files.left)
            ),
            "",
        )
        self._numbered = not any("blocks." in name for name in files.left)
        self._shared: Linear | None = None

    def head(self, number: int, depth: int) -> Head:
        layers = [self._layer(number, layer) for layer in range(depth)]
        return Head(layers, self._lm_head(number, depth))

    def _layer(self, number: int, layer: int) -> Linear:
        name = f"{number}.{layer}.linear" if self._numbered else f"blocks.{number}.layers.{layer}"
        weight = self._tensor(f"{name}.weight", (self._hidden, self._hidden))
        bias_name = f"{self._prefix}{name}.bias"
        bias = self._tensor(f"{name}.bias", (self._hidden,)) if bias_name in self._files else None
        return self._pack(weight, bias)

    def _lm_head(self, number: int, depth: int) -> Linear:
        """Return a head's vocabulary matrix.

        With vLLM's names, a head without one shares the first head's.
        """
        name = f"{number}.{depth}.weight" if self._numbered else f"lm_heads.{number}.weight"
        if (
            number
            and self._shared is not None
            and self._prefix + name not in self._files
            and not self._numbered
        ):
            return self._shared
        lm_head = self._pack(self._tensor(name, (self._target.vocab, self._hidden)), None)
        self._shared = self._shared or lm_head
        return lm_head

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        try:
            return self._files.need(self._prefix + name, shape, FLOATS)
        except ConfigError as error:
            model = f"{self._target.model_type} of hidden size {self._hidden} and {self._target.vocab} tokens"
            raise ConfigError(
                f"{self._source}: {error.message}; the heads must be those of this model, {model}"
            ) from error

    def _pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return pack_linear(weight, bias, self._target.weights, self._target.device)
