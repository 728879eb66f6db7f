"""Where `motet up` places processes on GPUs, and that `motet plan --stack` says the same."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motet_cli.checkpoints import model_folders
from motet_cli.main import main, up_arguments
from motet_cli.placement.devices import parse_devices
from motet_cli.placement.gpus import Gpu, GpuListing, list_gpus, visible
from motet_cli.placement.jobs import job_of, moved
from motet_cli.placement.placement import CONTEXT, Job, place
from motet_cli.supervision import up
from motet_cli.supervision.backoff import BackoffPolicy
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.connection import NatsAccess
from motet_cli.supervision.rolling import Rolling
from motet_cli.supervision.stack import Stack
from motet_cli.supervision.supervisor import Slot
from motet_shared.errors import ConfigError
from motet_shared.process.vitals import count_gpus
from support.peers.fake_gpus import UUIDS, put_nvidia_smi, put_nvml, put_program

MIB = 1 << 20
WEIGHTS = {"chat": 100, "voice": 20, "ears": 10}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}
BARE = ["--config", "none", "--vad", "0", "--draw", "none", "--embed", "none"]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide three checkpoints of some MiB, by name."""
    monkeypatch.setattr(model_folders, "model_dirs", lambda: [tmp_path])
    for name, size in WEIGHTS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / "tokenizer.json").write_text("{}")
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size * MIB)
    return tmp_path


def stack(*flags: str) -> Stack:
    return up.stack_of(
        up_arguments([*BARE, "--llm", "chat", "--asr", "ears", "--tts", "voice", *flags])
    )


def seen(found: Stack) -> dict[str, str]:
    """Return the CUDA_VISIBLE_DEVICES of the processes that compute on GPUs, as letters."""
    variables = {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in found.services()}
    return {name: value.replace("GPU-", "")[0] for name, value in variables.items() if value}


def memory(found: Stack, name: str) -> int:
    (spec,) = (spec for spec in found.services() if spec.name == name)
    return int(spec.argv[spec.argv.index("--memory") + 1])


def device(found: Stack, name: str) -> str:
    (spec,) = (spec for spec in found.services() if spec.name == name)
    return spec.argv[spec.argv.index("--device") + 1] if "--device" in spec.argv else "cpu"


def refused(*flags: str) -> str | None:
    with pytest.raises(ConfigError) as caught:
        stack(*flags)
    return caught.value.param


# ------------------------------------------------------------------------------------------------------- motet up
def test_each_process_has_a_gpu_of_its_own(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, [80_000] * 4)
    found = stack("--decode", "2", "--device", "cuda")
    assert seen(found) == {"decode-1": "a", "decode-2": "b", "tts": "c", "asr": "d"}
    assert device(found, "decode-1") == device(found, "asr") == "cuda"
    assert memory(found, "decode-1") == memory(found, "decode-2") == int(0.85 * 80_000 * MIB)
    assert found.placement is not None
    assert not found.placement.unused()
    assert found.memory is not None
    assert found.memory.engines == ()  # nothing of the main memory


def test_nothing_is_on_a_gpu_by_default(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program(tmp_path, monkeypatch, "exit 9")  # is not even called
    found = stack()
    assert seen(found) == {}
    assert device(found, "decode") == "cpu"
    assert found.placement is None


def test_processes_share_if_there_are_fewer_gpus(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, [10_000, 20_000])
    found = stack("--decode", "3", "--device", "cuda")
    assert seen(found) == {
        "decode-1": "a",
        "decode-2": "b",
        "decode-3": "a",
        "tts": "b",
        "asr": "b",
    }
    each = (int(0.85 * 10_000 * MIB) - CONTEXT) // 2
    assert memory(found, "decode-1") == memory(found, "decode-3") == each
    others = int(1.25 * (WEIGHTS["voice"] + WEIGHTS["ears"]) * MIB)
    assert memory(found, "decode-2") == int(0.85 * 20_000 * MIB) - 2 * CONTEXT - others
    assert found.placement is not None
    first, second = found.placement.describe()
    assert "decode-1" in first
    assert "decode-3" in first
    assert first.endswith("share it")
    assert second.startswith("cuda:1 (Fake 80GB)")


def test_roles_have_devices_and_shares_of_their_own(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, [10_000, 10_000])
    found = stack(
        *("--decode", "2", "--device", "cuda:1", "--device", "asr=cpu", "--memory-share", "0.9"),
        *("--memory-share", "decode=0.5", "--memory-share", "tts=0.2"),
    )
    assert seen(found) == {"decode-1": "b", "decode-2": "b", "tts": "b"}
    assert device(found, "asr") == "cpu"
    assert memory(found, "decode-1") == int(0.25 * 10_000 * MIB)
    (tts,) = (spec for spec in found.services() if spec.name == "tts")
    assert tts.env["MOTET_GPU_MEMORY"] == str(int(0.2 * 10_000 * MIB))
    assert found.placement is not None
    assert [gpu.number for gpu in found.placement.unused()] == [0]
    assert "not used: cuda:0" in found.placement.describe()[-1]


def test_motet_toml_places_roles_and_models(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, [10_000] * 3)
    file = tmp_path / "motet.toml"
    file.write_text(
        """
        [settings]
        device = ["cuda:0", "tts=cpu"]
        memory_share = 0.5
        [roles.asr]
        device = "cuda:1"
        memory_share = 0.25
        [models.fast]
        source = "chat"
        instances = 2
        settings = { device = "cuda:1,cuda:2", token_budget = 64 }
        """
    )
    flags = ["--config", str(file), *BARE[2:], "--asr", "ears", "--tts", "voice"]
    found = up.stack_of(up_arguments(flags))
    assert seen(found) == {"decode:fast-1": "b", "decode:fast-2": "c", "asr": "b"}
    assert memory(found, "decode:fast-2") == 5000 * MIB
    assert memory(found, "decode:fast-1") == 2500 * MIB - CONTEXT
    (fast, _) = (spec for spec in found.services() if spec.role == "decode")
    assert "--token-budget=64" in fast.argv
    assert not [one for one in fast.argv if one.startswith("--device=")]
    moved_away = up.stack_of(up_arguments([*flags, "--device", "asr=cuda:2"]))
    assert seen(moved_away)["asr"] == "c"  # the command line overrides the file


def test_models_on_demand_share_one_gpu(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, [10_000, 10_000])
    file = tmp_path / "motet.toml"
    later = '[models.a]\nsource = "chat"\nload = "on demand"\n[models.b]\nsource = "chat"\nload = "on demand"\n'
    file.write_text('[on_demand]\nmemory = "4GiB"\n' + later)
    flags = ["--config", str(file), *BARE[2:], "--asr", "none", "--tts", "none", "--device", "cuda"]
    found = up.stack_of(up_arguments([*flags, "--llm", "chat"]))
    assert seen(found) == {"decode": "a"}
    specs = [spec for _, one in found.on_demand() for spec in one]
    assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs} == {UUIDS[1]}
    file.write_text(later)
    with pytest.raises(ConfigError) as caught:
        up.stack_of(up_arguments(flags))
    assert caught.value.param == "on_demand.memory"


@pytest.mark.parametrize(
    ("flags", "param"),
    [
        (["--device", "gpu"], "--device"),
        (["--device", "cuda:2"], "--device"),
        (["--device", "tokenizer=cuda"], "--device"),
        (["--device", "asr="], "--device"),
        (["--memory-share", "1.5"], "--memory-share"),
        (["--memory-share", "gateway=0.5"], "--memory-share"),
        (
            ["--device", "cuda:0", "--memory-share", "decode=0.7", "--memory-share", "asr=0.5"],
            "--memory-share",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(
    flags: list[str],
    param: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, [10_000, 10_000])
    assert refused(*flags) == param


@pytest.mark.parametrize("script", ["exit 9", "true", "echo 'No devices were found'"])
def test_a_machine_without_gpus(
    script: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, [])
    put_program(tmp_path, monkeypatch, script)
    assert list_gpus().problem
    assert refused("--device", "cuda") == "--device"
    assert seen(stack("--device", "auto")) == {}
    monkeypatch.setenv("MOTET_DEVICE", "cuda")
    assert device(stack("--device", "cpu"), "asr") == "cpu"  # the flag overrides the variable
    assert refused() == "--device"


# ----------------------------------------------------------------------------------------------------- motet plan
def test_the_plan_is_what_is_started(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, [10_000, 10_000])
    given = ["--llm", "chat", "--asr", "ears", "--tts", "voice", "--decode", "2", "--prefill", "1"]
    flags = [*BARE, *given, "--device", "cuda", "--device", "asr=cpu"]
    assert main(["plan", "--json", "--stack", *flags]) == 0
    planned = json.loads(capsys.readouterr().out)
    options = up.parse_options(up_arguments([*flags, "--port", "0", "--no-store"]))
    assert rows_of(options.stack) == {one["process"]: started(one) for one in planned["processes"]}
    assert planned["notes"] == up.describe_gpus(options.stack)
    assert {one["process"]: one["kv_tokens"] > 0 for one in planned["processes"]} == {
        "decode-1": True,
        "decode-2": True,
        "prefill": True,
        "tts": False,
        "asr": False,
    }


def started(row: dict[str, Any]) -> tuple[str, int]:
    letters = "".join(UUIDS[int(one[5:])] if one != "cpu" else "" for one in row["devices"])
    return letters, row["memory"]


def rows_of(found: Stack) -> dict[str, tuple[str, int]]:
    """Return GPUs and memory of the processes with models, from what they are started with."""
    return {
        spec.name: (
            spec.env.get("CUDA_VISIBLE_DEVICES", ""),
            int(spec.argv[spec.argv.index("--memory") + 1]) if "--memory" in spec.argv else 0,
        )
        for spec in found.services()
        if job_of(spec) is not None
    }


def test_a_plan_for_gpus_that_are_not_here(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*BARE, "--llm", "chat", "--asr", "none", "--tts", "none", "--device", "cuda"]
    assert main(["plan", "--json", "--gpu", "H100", "--gpus", "2", "--stack", *flags]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert [gpu["name"] for gpu in planned["gpus"]] == ["H100", "H100"]
    assert [one["devices"] for one in planned["processes"]] == [["cuda:0"]]
    assert len(planned["notes"]) == 2  # one GPU is not used
    for wrong in (
        ["plan", "--gpus", "2", "--stack"],
        ["plan", "--gpu", "H100", "--stack"],
        ["plan", "chat", "--stack"],
        ["plan"],
    ):
        assert main(wrong) == 2


# --------------------------------------------------------------------------------------------------- other engines
def test_another_engine_has_as_many_gpus_as_it_computes_on() -> None:
    def of(args: str) -> int:
        argv = (
            "python",
            "host.py",
            "--model",
            "/none",
            "--engine",
            "vllm",
            f"--engine-args={args}",
        )
        job = job_of(ChildSpec(name="decode", role="decode", argv=argv), {})
        assert job is not None
        assert job.is_foreign
        return job.gpus

    assert of("--dtype bfloat16") == 1
    assert of("--tensor-parallel-size 2 -pp 2") == 4
    assert of("--tensor_parallel_size=4 --data-parallel-size 2") == 8
    assert of("--tensor-parallel-size 8 --distributed-executor-backend ray") == 0
    url = ("python", "-m", "motet_engines", "--engine", "openai", "--engine-url", "http://x/v1")
    assert job_of(ChildSpec(name="decode", role="decode", argv=url), {}) is None


def test_larger_engines_choose_first_and_none_is_cut() -> None:
    gpus = GpuListing(tuple(Gpu(number=n, key=UUIDS[n], name="g", free=MIB) for n in range(4)))
    own = Job(name="own", role="decode", is_engine=True)
    pair = Job(name="pair", role="decode", gpus=2, is_foreign=True)
    every = Job(name="all", role="decode", gpus=0, is_foreign=True)
    found = place([own, pair], parse_devices([], env={"MOTET_DEVICE": "auto"}), gpus)
    places = {name: [gpu.number for gpu in one.gpus] for name, one in found.places.items()}
    assert places == {"own": [2], "pair": [0, 1]}
    unset = parse_devices([], env={})
    assert len(place([every], unset, gpus).places["all"].gpus) == 4  # GPUs without --device
    assert place([own], unset, gpus).of("own") is None
    with pytest.raises(ConfigError) as caught:
        place([Job(name="x", role="decode", gpus=8, is_foreign=True)], unset, gpus)
    assert caught.value.param == "--engine-args"


def test_another_instance_goes_to_a_free_gpu_or_is_refused() -> None:
    def spec(name: str, role: str, gpu: str) -> ChildSpec:
        return ChildSpec(name=name, role=role, argv=(), gpus=(gpu,))

    first, voice = spec("decode", "decode", "A"), spec("tts", "tts", "B")
    new = moved(spec("decode-2", "decode", "A"), [first], ["A", "B"])
    assert (new.gpus, new.env["CUDA_VISIBLE_DEVICES"]) == (("B",), "B")
    assert moved(voice, [first, voice, new], ["A", "B"]).gpus == ("A",)
    with pytest.raises(ConfigError) as caught:
        moved(spec("decode-2", "decode", "A"), [first, voice], ["A", "B"])
    assert caught.value.param == "ROLE=N"


class Recorder:
    """Record what is started and stopped, in place of a supervisor."""

    def __init__(self, *specs: ChildSpec) -> None:
        self.done: list[str] = []
        self.slots = [Slot(spec, BackoffPolicy()) for spec in specs]

    def add(
        self, spec: ChildSpec, before: Slot | None = None, gate: asyncio.Event | None = None
    ) -> Slot:
        slot = Slot(spec, BackoffPolicy())
        self.slots.append(slot)
        self.done.append(f"add {spec.name}" + (" later" if gate is not None else ""))
        return slot

    async def remove(self, slot: Slot, drain: float | None = None) -> bool:
        self.done.append(f"remove {slot.spec.name}")
        self.slots.remove(slot)
        return True


@pytest.mark.parametrize(
    ("role", "gpus", "order"),
    [
        ("decode", ("A",), ["add decode later", "remove decode"]),
        ("decode", (), ["add decode", "remove decode"]),
        ("tts", ("A",), ["add tts", "remove tts"]),
    ],
)
async def test_a_gpu_need_not_hold_an_engine_twice(
    role: str, gpus: tuple[str, ...], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(ChildSpec(name=role, role=role, argv=(), gpus=gpus))
    rolling = Rolling(recorder, NatsAccess(""), lambda _: None, ["A"])  # type: ignore[arg-type]

    async def ready(*_: object, **__: object) -> float:
        return 0.0

    monkeypatch.setattr(rolling, "_ready", ready)
    await rolling._replace(recorder.slots[0], 0.0, None, lambda _: None)  # type: ignore[arg-type]
    assert recorder.done == order


@pytest.mark.parametrize(
    ("role", "done"),
    [
        ("talker", ["add talker-2"]),
        ("code2wav", ["add code2wav-2"]),
        ("tts", ["add code2wav-2"]),
        ("decode", ["add decode-2", "add talker-2"]),
    ],
)
async def test_stages_of_an_omni_model_scale_alone(
    role: str, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(ChildSpec(name="decode", role="decode", argv=(), model="m"))
    recorder.add(ChildSpec(name="talker", role="decode", argv=(), model="m-talker"))
    recorder.add(ChildSpec(name="code2wav", role="tts", argv=(), model="m"))
    recorder.done.clear()
    rolling = Rolling(recorder, NatsAccess(""), lambda _: None, ["A"])  # type: ignore[arg-type]

    async def ready(*_: object, **__: object) -> float:
        return 0.0

    monkeypatch.setattr(rolling, "_ready", ready)
    rolling._check([role])
    await rolling._scale(role, 2, 0.0, None, lambda _: None)  # type: ignore[arg-type]
    assert recorder.done == done


# ------------------------------------------------------------------------------------------- CUDA_VISIBLE_DEVICES
ENTRIES = st.sampled_from(
    ["0", "1", "2", "5", "-1", "", UUIDS[0], UUIDS[1], UUIDS[2][:8], "GPU-", "no"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(entries=st.lists(ENTRIES, min_size=1, max_size=4))
def test_as_many_gpus_are_visible_as_torch_counts(
    entries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ",".join(entries)
    installed = [Gpu(number=n, key=UUIDS[n], name="g") for n in range(3)]
    put_nvml(monkeypatch, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert len(visible(installed, text)) == torch.cuda._device_count_nvml()


def test_visible_gpus_are_numbered_as_torch_numbers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, [1000, 2000, "[N/A]"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    first, second = list_gpus().gpus
    assert (first.number, first.key, first.free) == (0, UUIDS[2], 0)
    assert (second.number, second.key, second.free) == (1, UUIDS[0], 1000 * MIB)
    put_nvml(monkeypatch, 3)
    for gpu in (first, second):  # what a process is started with shows it one GPU
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu.key)
        assert torch.cuda._device_count_nvml() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list_gpus().problem


def test_device_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus(tmp_path) == 3
    assert count_gpus(tmp_path / "none") == 0
    for given_, count in (("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given_)
        assert count_gpus(tmp_path) == count
