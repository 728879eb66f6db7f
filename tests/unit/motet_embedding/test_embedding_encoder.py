"""Vectors of sentence encoders against transformers' own forward pass and the poolings of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModel

from motet_embedding.config import EngineConfig
from motet_embedding.encoder import Encoder
from motet_embedding.folder import Folder
from motet_embedding.pooling import MODES, Pooling
from motet_embedding.texts import Text, Texts
from motet_shared.errors import BadRequest, ConfigError, ContextTooLong
from support.checkpoints.embedding_checkpoints import (
    FAMILIES,
    LONGEST,
    PADDED,
    ids,
    means,
    plain,
    reference,
    sentence_transformer,
)
from support.running.refusals import refuses

LENGTHS = (2, 61, 9, LONGEST, 3, 30, 9)
TEXTS = [ids(length, seed) for seed, length in enumerate(LENGTHS)]


def load(path: Path, **settings: object) -> Encoder:
    limit = (
        {}
        if json.loads((path / "config.json").read_text())["model_type"] != "t5"
        else {"max_length": LONGEST}
    )
    return Encoder.load(EngineConfig(model=str(path), **limit | settings))  # type: ignore[arg-type]


def of(*texts: list[int]) -> list[Text]:
    return [Text(text) for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_company_and_alone_as_transformers_computes_it(family: str, tmp_path: Path) -> None:
    encoder = load(plain(tmp_path, family))
    assert encoder.packed == (family not in PADDED)
    assert encoder.limit == LONGEST
    hidden = reference(tmp_path, TEXTS)
    pooled = [tokens[-1] if family == "qwen3" else tokens.mean(dim=0) for tokens in hidden]
    due = functional.normalize(torch.stack(pooled))
    together = encoder.encode(of(*TEXTS))
    torch.testing.assert_close(together, due, atol=1e-5, rtol=0)
    for text, vector in zip(TEXTS, due, strict=True):
        torch.testing.assert_close(encoder.encode(of(text))[0], vector, atol=1e-5, rtol=0)
    assert (due[1:] - due[:-1]).norm(dim=1).min() > 1e-2, (
        "the texts must differ for this to mean anything"
    )


def test_in_half_precision_vectors_are_nearly_the_same(tmp_path: Path) -> None:
    exact, half = load(plain(tmp_path)), load(tmp_path, dtype="bfloat16")
    assert half.packed
    due, found = exact.encode(of(*TEXTS)), half.encode(of(*TEXTS))
    assert found.dtype == torch.float32
    assert (due * found).sum(dim=1).min() > 0.99


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"device": "gpu"}, "device"),
        (
            {"device": f"cuda:{torch.cuda.device_count()}"},
            "device",
        ),
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_devices_and_types_that_are_not_there_are_refused(
    settings: dict[str, str], param: str, tmp_path: Path
) -> None:
    path = plain(tmp_path)
    with refuses(ConfigError, param):
        load(path, **settings)


def test_on_a_cpu_the_model_computes_in_float32_unless_told_otherwise(tmp_path: Path) -> None:
    path = plain(tmp_path)
    AutoModel.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    assert load(path).describe()["dtype"] == "float32"
    assert load(path, dtype="bfloat16").describe()["dtype"] == "bfloat16"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("old", [True, False])
def test_every_pooling_as_sentence_transformers_has_it(
    mode: str, old: bool, tmp_path: Path
) -> None:
    flags = {
        "cls": "cls_token",
        "max": "max_tokens",
        "mean": "mean_tokens",
        "weightedmean": "weightedmean_tokens",
    }
    said = {f"pooling_mode_{flags.get(mode, mode)}": True} if old else {"pooling_mode": mode}
    encoder = load(sentence_transformer(tmp_path, pooling=said, normalize=False))
    for text, tokens in zip(TEXTS, reference(tmp_path, TEXTS), strict=True):
        places = torch.arange(1.0, len(text) + 1)[:, None]
        due = {
            "cls": tokens[0],
            "max": tokens.max(dim=0).values,
            "mean": tokens.mean(dim=0),
            "mean_sqrt_len_tokens": tokens.sum(dim=0) / len(text) ** 0.5,
            "weightedmean": (tokens * places).sum(dim=0) / places.sum(),
            "lasttoken": tokens[-1],
        }[mode]
        torch.testing.assert_close(encoder.encode(of(text))[0], due, atol=1e-5, rtol=1e-5)


def test_several_poolings_a_dense_layer_and_no_normalization(tmp_path: Path) -> None:
    said = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    two = load(sentence_transformer(tmp_path / "two", pooling=said, normalize=False))
    tokens = reference(tmp_path / "two", TEXTS[:1])[0]
    due = torch.cat([tokens[0], tokens.mean(dim=0)])
    torch.testing.assert_close(two.encode(of(TEXTS[0]))[0], due, atol=1e-5, rtol=1e-5)
    path = sentence_transformer(tmp_path / "dense", dense=12, normalize=False)
    encoder = load(path)
    assert encoder.size == 12
    from safetensors.torch import load_file

    weights = load_file(path / "2_Dense" / "model.safetensors")
    mean = torch.stack([tokens.mean(dim=0) for tokens in reference(path, TEXTS)])
    due = torch.tanh(mean @ weights["linear.weight"].T + weights["linear.bias"])
    torch.testing.assert_close(encoder.encode(of(*TEXTS)), due, atol=1e-5, rtol=1e-5)
    unit = load(path, normalize="always").encode(of(*TEXTS))
    torch.testing.assert_close(unit, functional.normalize(due), atol=1e-5, rtol=1e-5)


def test_a_prompt_goes_before_the_text_and_counts_only_if_the_folder_says_so(
    tmp_path: Path,
) -> None:
    prompts = {"query": "query: ", "document": "text: "}
    for name, said in (("in", {}), ("out", {"include_prompt": False})):
        path = sentence_transformer(
            tmp_path / name,
            pooling={"pooling_mode_mean_tokens": True} | said,
            prompts=prompts,
            default_prompt="document",
        )
        encoder = load(path)
        texts = Texts(Folder.read(path), encoder.limit, encoder.vocabulary)
        [asked], [default] = texts.read(["ba be"], "query"), texts.read(["ba be"])
        assert (len(asked), asked.prompt) == (5, 2)
        assert asked.ids != default.ids
        [tokens] = reference(path, [asked.ids])
        due = functional.normalize((tokens if name == "in" else tokens[2:]).mean(dim=0), dim=0)
        torch.testing.assert_close(encoder.encode([asked])[0], due, atol=1e-5, rtol=0)
        with refuses(BadRequest, "prompt_name"):
            texts.read(["ba"], "passage")


def test_texts_and_token_ids_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    path = sentence_transformer(tmp_path, settings={"max_seq_length": 12, "do_lower_case": True})
    encoder = load(path)
    assert encoder.limit == 12, "the least of what is said"
    texts = Texts(Folder.read(path), encoder.limit, encoder.vocabulary)
    [text] = texts.read(["A b BA"])
    assert text.ids == [0, 4, 5, texts.read(["ba"])[0].ids[1], 2], (
        "in lower case, between the special tokens"
    )
    assert [one.ids for one in texts.read([[7, 8], [9]])] == [[7, 8], [9]]
    torch.testing.assert_close(
        encoder.encode(of(text.ids)), means(path, [text.ids]), atol=1e-5, rtol=0
    )
    cases: list[tuple[list[str | list[int]], str]] = [
        ([""], "input: "),
        (["a", ""], "input[1]: "),
        ([[5], []], "input[1]: "),
        ([[5, 160]], "input[1]: 160 "),
        ([[5, -1]], "input[1]: -1 "),
        (["a", [5]], "input: "),
    ]
    for wrong, start in cases:
        with refuses(BadRequest, "input") as caught:
            texts.read(wrong)
        assert str(caught.value).startswith(start)
    with refuses(ContextTooLong, "input"):
        texts.read(["a", "b " * 11])


def test_a_folder_that_is_not_served_says_why(tmp_path: Path) -> None:
    def refused(param: str, change: dict[str, object] | None = None, **settings: object) -> None:
        path = sentence_transformer(tmp_path / str(len(list(tmp_path.iterdir()))))
        for name, content in (change or {}).items():
            text = content if isinstance(content, str) else json.dumps(content)
            (path / name).write_text(text)
        with refuses(ConfigError, param):
            load(path, **settings)

    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": ""}
        for kind in ("Transformer", "LSTM")
    ]
    refused("model", {"modules.json": modules})
    refused("model", {"modules.json": modules[:1]})
    refused("model", {"modules.json": "{"})
    refused("model", {"1_Pooling/config.json": {"pooling_mode": "best"}})
    refused("model", {"1_Pooling/config.json": {"word_embedding_dimension": 4}})
    refused("model", {"config_sentence_transformers.json": {"default_prompt_name": "x"}})
    refused("model", {"config.json": {"model_type": "nothing"}})
    refused("max_length", max_length=97)
    refused("pooling", pooling="some")
    with refuses(ConfigError, "model"):
        EngineConfig(model=str(tmp_path))


def test_weights_that_are_missing_are_no_encoder(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = plain(tmp_path)
    weights = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "pooler" not in name}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    load(path)
    save_file(
        {n: t for n, t in kept.items() if "layer.1" not in n},
        path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ConfigError, match=r"16 .*encoder\.layer\.1"):
        load(path)


def test_pooling_needs_a_mode() -> None:
    with pytest.raises(ValueError, match="pooling: "):
        Pooling(modes=())
