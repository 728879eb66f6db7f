"""EAGLE's layer: its guesses are those of the same layer computed at once over the model's true hidden states."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.speculation.eagle import EagleDrafts
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import VOCAB, tiny_checkpoint
from support.running.refusals import refuses

HIDDEN, DRAFT = 32, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"), hidden_size=HIDDEN, head_dim=8)


class Reference(nn.Module):
    """The layer over whole sequences."""

    def __init__(self, sizes: dict[str, Any] = SIZES) -> None:
        super().__init__()
        torch.manual_seed(3)
        width = sizes["hidden_size"]
        self.model = LlamaModel(LlamaConfig(**sizes, attn_implementation="eager")).eval()
        self.fc = nn.Linear(2 * width, width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.15)
        self.model.layers[0].input_layernorm, self.model.norm = nn.Identity(), nn.Identity()

    def tensors(self) -> dict[str, Tensor]:
        """As they are published."""
        state = {
            name.removeprefix("model."): tensor.clone()
            for name, tensor in self.state_dict().items()
        }
        return state | {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}

    @torch.inference_mode()
    def guess(self, target: Any, tokens: list[int], count: int) -> list[int]:
        """What it guesses behind `tokens`, of which the last one is not computed yet."""
        ids = torch.tensor([tokens])
        hidden_1NX = target.model(ids[:, :-1]).last_hidden_state
        draft: list[int] = []
        for _ in range(count):
            embedded = target.get_input_embeddings()(torch.tensor([(tokens + draft)[1:]]))
            out = self.model(
                inputs_embeds=self.fc(torch.cat((embedded, hidden_1NX), -1))
            ).last_hidden_state
            draft.append(int(target.lm_head(out[0, -1]).argmax()))
            hidden_1NX = torch.cat((hidden_1NX, out[:, -1:]), dim=1)
        return draft


def write_layer(path: Path, reference: Reference, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **config}))
    save_file(reference.tensors(), path / "model.safetensors")
    return path


def make_engine(folder: Path, speculate: str = "off", **options: Any) -> Engine:
    sizes = {
        "block_size": 4,
        "num_blocks": 60,
        "token_budget": 16,
        "max_running": 8,
        "decode_slowdown": 0,
    }
    given = {
        "threads": 1,
        "overlap": False,
        "always_speculate": True,
        "draft_tokens": DRAFT,
        **sizes,
        **options,
    }
    return Engine(EngineConfig(model=str(folder), speculate=speculate, **given))


def answers(engine: Engine, temperature: float = 0.0) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for key in range(4):
        prompt = [
            7 + key,
            20,
            33,
            41,
            8 * key,
            50,
            60,
            61,
            62,
            63,
            64,
            65,
            66,
            67,
            68,
            69,
            70,
            71,
            72,
        ][: 5 + 4 * key]
        engine.add(
            key, prompt, Sampling(temperature=temperature, seed=key, max_tokens=14, ignore_eos=True)
        )
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.key, []).extend(output.ids)
        engine.check_integrity()
    return found


def test_its_guesses_are_those_of_the_whole_sequence(folder: Path, tmp_path: Path) -> None:
    """Whatever was guessed before: states of guesses give way to true ones, over prompts in pieces and over blocks."""
    reference = Reference()
    engine = make_engine(folder, str(write_layer(tmp_path, reference)), prefix_cache=False)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert engine.speculation is not None
    assert isinstance(engine.speculation.drafts, EagleDrafts)
    drafts: Any = engine.speculation.drafts
    proposed: list[tuple[list[int], list[int]]] = []
    propose = drafts.propose

    def noting(wanted: Any) -> Any:
        found = propose(wanted)
        proposed.extend((list(request.tokens), draft) for request, draft in found.items())
        return found

    drafts.propose = noting
    free = answers(make_engine(folder, prefix_cache=False))
    assert answers(engine) == free
    assert len(proposed) > 30
    assert all(draft == reference.guess(target, tokens, len(draft)) for tokens, draft in proposed)
    assert len({tuple(draft) for _, draft in proposed}) > 10


def test_cached_prefixes_preemption_and_sampling_change_nothing(
    folder: Path, tmp_path: Path
) -> None:
    path = str(write_layer(tmp_path, Reference()))
    free = answers(make_engine(folder), temperature=1.0)
    engine = make_engine(folder, path, num_blocks=16)
    for _ in range(2):  # the second time prompts are cached: their hidden states are not there
        assert answers(engine, temperature=1.0) == free
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["drafted_tokens"] > 50
    assert stats["blocks_free"] == stats["blocks_total"]


def test_the_layer_of_another_model_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = write_layer(tmp_path / "layers", Reference(), num_hidden_layers=2)
    with refuses(ConfigError, "speculate"):
        make_engine(folder, str(path))
    wide = tiny_checkpoint("llama", tmp_path / "wide", hidden_size=64, head_dim=16)
    path = write_layer(tmp_path / "narrow", Reference())
    with refuses(ConfigError, "speculate"):
        make_engine(wide, str(path))
    tensors = Reference().tensors()
    save_file({**tensors, "midlayer.weight": torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"midlayer\.weight"):
        make_engine(folder, str(path))
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with refuses(ConfigError, "speculate"):
        make_engine(folder, str(path))
