"""Test the options that `motet up` rejects, and the processes that it would start."""

import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from motet_cli.checkpoints import model_folders as models
from motet_cli.main import main, parser
from motet_cli.stack_file.arguments import read_given
from motet_cli.supervision import nats, up
from motet_cli.supervision.stack import Stack, compute_cores, starts_at_once
from motet_shared.errors import ConfigError
from motet_shared.testing import free_port


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a folder with the files of a checkpoint, the only known model."""
    monkeypatch.setattr(models, "model_dirs", lambda: [tmp_path])
    path = tmp_path / "tiny-llama"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


POCKET_TTS = Path(__file__).resolve().parents[4] / "models" / "pocket-tts"


def options(*argv: str) -> up.UpOptions:
    return up.parse_options(parser().parse_args(["up", *argv]))


def refusal(*argv: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        options(*argv)
    return caught.value


def test_kernels_on_torch_cause_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_NATIVE", "off")
    assert "MOTET_NATIVE=off" in up.fallback_warning()
    monkeypatch.delenv("MOTET_NATIVE")
    assert up.fallback_warning() == ""
    for name, value in {"MOTET_CACHE": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}.items():
        monkeypatch.setenv(name, value)
    assert "g++" in up.fallback_warning()


def test_a_port_in_use_is_rejected(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refusal("--port", str(port), "--llm", str(folder))
        assert error.param == "--port"
        assert str(port) in error.message


def test_other_hosts_need_a_key_or_insecure(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOTET_API_KEY", "MOTET_API_KEY_FILE", "MOTET_TENANTS_FILE"):
        monkeypatch.delenv(name, raising=False)
    common = ("--port", "0", "--llm", str(folder), "--host", "0.0.0.0")
    assert refusal(*common).param == "--host"
    assert options(*common, "--insecure").stack.insecure
    key = tmp_path / "key"
    assert refusal(*common, "--api-key-file", str(key)).param == "--api-key-file"
    key.write_text("k")
    assert options(*common, "--api-key-file", str(key)).stack.access.api_key_file == key


def test_a_tenants_file_permits_other_hosts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--port", "0", "--llm", str(folder), "--host", "0.0.0.0")
    file = tmp_path / "tenants.toml"
    assert refusal(*common, "--tenants-file", str(file)).param == "--tenants-file"
    file.write_text("")
    monkeypatch.setenv("MOTET_TENANTS_FILE", str(file))
    (gateway, *_) = options(*common, "--allowed-origins", "https://a.example").stack.services()
    assert gateway.argv[gateway.argv.index("--tenants-file") + 1] == str(file)
    assert gateway.argv[gateway.argv.index("--allowed-origins") + 1] == "https://a.example"
    (gateway, *_) = options(
        *common, "--allowed-hosts", "a.example", "--trusted-proxies", "10.0.0.0/8"
    ).stack.services()
    assert gateway.argv[gateway.argv.index("--allowed-hosts") + 1] == "a.example"
    assert gateway.argv[gateway.argv.index("--trusted-proxies") + 1] == "10.0.0.0/8"


def test_a_certificate_needs_its_key(folder: Path, tmp_path: Path) -> None:
    common = ("--port", "0", "--llm", str(folder))
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text("")
    assert refusal(*common, "--tls-cert", str(cert)).param == "--tls-key"
    error = refusal(*common, "--tls-cert", str(cert), "--tls-key", str(key))
    assert error.param == "--tls-key"
    assert str(key) in error.message
    key.write_text("")
    stack = options(*common, "--tls-cert", str(cert), "--tls-key", str(key)).stack
    assert stack.services()[0].argv.count(str(key)) == 1


def test_a_voice_finds_the_language_model_of_its_folder(folder: Path) -> None:
    """A folder that is given as both is one whose tokens are codes."""
    common = ("--port", "0", "--llm", f"speaker={folder}")
    for voice, named in ((f"voice={folder}", ["speaker"]), (str(POCKET_TTS), [])):
        argv = next(
            s for s in options(*common, "--tts", voice).stack.services() if s.role == "tts"
        ).argv
        found = [argv[at + 1] for at, flag in enumerate(argv) if flag == "--language-model"]
        assert found == named


def test_a_foreign_host_is_rejected(folder: Path) -> None:
    error = refusal("--host", "192.0.2.1", "--insecure", "--llm", str(folder))
    assert error.param == "--host"
    assert "192.0.2.1" in error.message


@pytest.mark.parametrize("flag", ["--decode", "--tokenizer"])
def test_zero_instances_are_rejected(flag: str, folder: Path) -> None:
    assert refusal(flag, "0", "--llm", str(folder), "--port", "0").param == flag


@pytest.mark.parametrize("part", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_checkpoint_is_rejected_with_the_missing_file(
    part: str, folder: Path
) -> None:
    (folder / part).unlink()
    error = refusal("--llm", str(folder), "--port", "0")
    assert error.param == "--llm"
    assert str(folder) in error.message
    assert part in error.message


def test_an_unknown_model_is_rejected_with_the_known_ones(folder: Path) -> None:
    error = refusal("--llm", "/nowhere", "--port", "0")
    assert error.param == "--llm"
    assert "tiny-llama" in error.message


def test_models_are_found_by_name(folder: Path) -> None:
    assert models.resolve("tiny-llama").path == folder


def test_two_models_of_one_name_are_rejected(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    folder.rename(other / "tiny-llama")
    (other / "again").mkdir()
    copy = other / "again" / "tiny-llama"
    copy.mkdir()
    for file in (other / "tiny-llama").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    error = refusal("--llm", str(other / "tiny-llama"), "--llm", str(copy))
    assert error.param == "--llm"
    assert "tiny-llama" in error.message


def test_one_decode_process_per_model_and_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_NATS_PASSWORD", "of-another-server")
    parsed = options("--llm", str(folder), "--decode", "2", "--tokenizer", "2", "--port", "0")
    services = replace(parsed.stack, credentials=folder / "nats").services()
    assert [s.name for s in services] == [
        "gateway",
        "tokenizer-1",
        "tokenizer-2",
        "decode-1",
        "decode-2",
        "vad",
    ]
    assert [s.model for s in services if s.role == "decode"] == ["tiny-llama"] * 2
    assert all(s.env["MOTET_NATS_PASSWORD"] == "" for s in services)
    assert all(s.env["MOTET_NATS_CREDENTIALS"] == str(folder / "nats" / s.role) for s in services)
    assert [s.stage for s in services] == sorted(s.stage for s in services)


def test_prefill_processes_are_added(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    common = ("--llm", str(folder), "--port", "0")
    assert "prefill" not in [s.role for s in options(*common).stack.services()]
    services = options(*common, "--decode", "2", "--prefill", "2").stack.services()
    engines = [s for s in services if s.role in ("decode", "prefill")]
    assert [s.name for s in engines] == ["decode-1", "decode-2", "prefill-1", "prefill-2"]
    assert all(s.argv[s.argv.index("--role") + 1] == s.role for s in engines)
    assert {s.env["OMP_NUM_THREADS"] for s in engines} == {str(max(1, compute_cores() // 4))}
    assert refusal(*common, "--prefill", "-1").param == "--prefill"


def test_speculate_reaches_decode_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def speculate_values(*argv: str) -> list[list[str]]:
        services = options(
            "--llm", str(folder), "--port", "0", "--prefill", "1", *argv
        ).stack.services()
        engines = [list(s.argv) for s in services if s.role in ("decode", "prefill")]
        return [
            one[one.index("--speculate") + 1 :][:1] if "--speculate" in one else []
            for one in engines
        ]

    assert speculate_values() == [[], []]
    assert speculate_values("--speculate", "ngram") == [["ngram"], []]
    (tmp_path / "draft").mkdir()
    assert speculate_values("--speculate", "draft") == [[str(tmp_path / "draft")], []]


def test_degrees_of_groups_reach_all_workers_of_the_model(folder: Path) -> None:
    common = ("--llm", str(folder), "--port", "0", "--prefill", "1")
    services = options(
        *common, "--tensor-parallel", "2", "--pipeline-parallel", "3"
    ).stack.services()
    for spec in services:
        given = [spec.argv[i + 1] for i, one in enumerate(spec.argv) if one.endswith("-parallel")]
        assert given == (["2", "3"] if spec.role in ("decode", "prefill") else [])
    assert refusal(*common, "--tensor-parallel", "0").param == "--tensor-parallel"
    other = ("--engine", "openai", "--engine-url", "http://127.0.0.1:1/v1")
    error = refusal("--llm", str(folder), "--port", "0", *other, "--expert-parallel", "2")
    assert error.param == "--expert-parallel"


def test_vad_can_be_left_out(folder: Path) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert "vad" not in [s.role for s in options(*common, "--vad", "0").stack.services()]
    assert [s.name for s in options(*common, "--vad", "2").stack.services()][-2:] == [
        "vad-1",
        "vad-2",
    ]
    assert refusal(*common, "--vad", "-1").param == "--vad"


@pytest.mark.parametrize(
    ("flag", "role", "kind"),
    [("tts", "tts", "vits"), ("asr", "asr", "whisper"), ("embed", "embedding", "bert")],
)
def test_optional_models_are_served_if_present(
    flag: str, role: str, kind: str, folder: Path, tmp_path: Path
) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert getattr(options(*common).stack, flag) is None
    model = tmp_path / f"pocket-{flag}"
    model.mkdir()
    error = refusal(*common, f"--{flag}", str(model))
    assert error.param == f"--{flag}"
    assert "config.json" in error.message
    (model / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    (model / "model.safetensors").write_bytes(b"")
    for given in ((), (f"--{flag}", model.name), (f"--{flag}", str(model))):
        (spec,) = [s for s in options(*common, *given).stack.services() if s.role == role]
        assert spec.model == model.name
        assert spec.argv[1:5] == ("-m", f"motet_{role}", "--model", str(model))
    assert getattr(options(*common, f"--{flag}", "none").stack, flag) is None
    assert refusal(*common, f"--{flag}", "unknown").param == f"--{flag}"


def test_a_ranker_is_served_on_request(folder: Path, tmp_path: Path) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert options(*common).stack.rank is None
    model = tmp_path / "ranker"
    model.mkdir()
    assert refusal(*common, "--rank", str(model)).param == "--rank"
    (model / "config.json").write_text('{"model_type": "bert"}')
    (model / "model.safetensors").write_bytes(b"")
    stack = options(*common, "--rank", f"best={model}").stack
    (spec,) = [one for one in stack.services() if one.role == "ranking"]
    assert (spec.name, spec.model) == ("ranking", "best")
    expected = ("-m", "motet_embedding", "--role", "ranking", "--model", str(model))
    assert spec.argv[1:7] == expected
    assert "ranking=best" in stack.expected()


def test_the_planner_runs_on_request(folder: Path, tmp_path: Path) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert options(*common).stack.planner is None
    other = shutil.copytree(folder, tmp_path / "other")
    assert refusal(*common, "--llm", str(other), "--planner").param == "--planner"
    roles = tmp_path / "roles.toml"
    roles.write_text("[decode]\nmin = 0\n")
    assert "min=0" in refusal(*common, "--planner", str(roles)).message
    roles.write_text("[decode]\nmax = 3\n")
    stack = options(*common, "--planner", str(roles)).stack
    (spec,) = [s for s in stack.services() if s.role == "planner"]
    url = f"http://127.0.0.1:{stack.port}"
    given = ("-m", "motet_planner", "--actuator", "local", "--url", url, "--roles", str(roles))
    assert spec.argv[1 : 1 + len(given)] == given
    assert options(*common, "--planner").stack.planner is not None


def test_speakers_are_served_on_request(folder: Path, tmp_path: Path) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert refusal(*common, "--speakers").param == "--speakers"
    voices = tmp_path / "pocket-speakers"
    voices.mkdir()
    (voices / "config.json").write_text('{"model_type": "motet-speakers"}')
    (voices / "model.safetensors").write_bytes(b"")
    assert options(*common).stack.speakers is None
    for given in (("--speakers",), ("--speakers", str(voices))):
        (spec,) = [s for s in options(*common, *given).stack.services() if s.role == "speakers"]
        assert spec.argv[1:5] == ("-m", "motet_speakers", "--model", str(voices))


def test_an_image_model_is_served_if_present(folder: Path, tmp_path: Path) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert options(*common).stack.draw is None
    model = tmp_path / "pocket-draw"
    model.mkdir()
    error = refusal(*common, "--draw", str(model))
    assert error.param == "--draw"
    assert "model_index.json" in error.message
    (model / "model_index.json").write_text("{}")
    for given in ((), ("--draw", "pocket-draw"), ("--draw", str(model))):
        (spec,) = [s for s in options(*common, *given).stack.services() if s.role == "diffusion"]
        assert spec.argv[1:5] == ("-m", "motet_diffusion", "--model", str(model))
    assert options(*common, "--draw", "none").stack.draw is None
    assert refusal(*common, "--draw", "unknown").param == "--draw"


def test_a_video_model_is_loaded_on_demand_if_present(folder: Path, tmp_path: Path) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert options(*common).stack.on_demand() == []
    model = tmp_path / "pocket-film"
    model.mkdir()
    (model / "model_index.json").write_text('{"_class_name": "PixArtSigmaPipeline"}')
    assert "makes no videos" in refusal(*common, "--film", str(model)).message
    (model / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    for given in ((), ("--film", "pocket-film"), ("--planner",)):
        stack = options(*common, *given).stack
        [(declared, [spec])] = stack.on_demand()
        assert (declared.role, declared.device, spec.model) == ("diffusion", "cpu", "pocket-film")
        assert spec.argv[1:5] == ("-m", "motet_diffusion", "--model", str(model))
        assert not [one for one in stack.services() if one.role == "diffusion"]
        assert stack.on_demand_memory == declared.memory < 2**30
    assert options(*common, "--film", "none").stack.on_demand() == []
    assert refusal(*common, "--film", "unknown").param == "--film"
    other = tmp_path / "motet.toml"
    other.write_text('[models.pocket-film]\nrole = "draw"\nload = "on demand"\n')
    args = parser().parse_args(["up", *common])
    args.stack_file = read_given(str(other))
    [(declared, _)] = up.parse_options(args).stack.on_demand()
    assert declared.device == "", "the file's own, not the default"


def test_state_is_stored_in_a_folder_of_the_port(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert options(*common).store is None, "there is no port to come back to"
    port = str(free_port())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fixed = ("--llm", str(folder), "--port", port)
    assert options(*fixed).store == tmp_path / "state" / "motet" / port
    assert options(*fixed, "--no-store").store is None
    assert options(*fixed, "--nats", "nats://there").store is None
    assert refusal(*fixed, "--no-store", "--store", "x").param == "--no-store"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert options(*fixed).store == tmp_path / ".local/state/motet" / port
    assert "--jetstream" not in nats.spec(4222, tmp_path).argv
    assert (store := options(*common, "--store", str(tmp_path / "kept")).store) == tmp_path / "kept"
    assert nats.spec(4222, tmp_path, store).argv[-3:] == ("--jetstream", "--store_dir", str(store))
    assert refusal(*common, "--store", "x", "--nats", "nats://there").param == "--store"


def test_the_turn_model_is_used_if_present(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turns_option() -> list[str]:
        vad = next(
            s
            for s in options("--llm", str(folder), "--port", "0").stack.services()
            if s.role == "vad"
        )
        return [part for part in vad.argv if "turns" in part]

    monkeypatch.setattr(models, "model_dirs", lambda: [tmp_path / "models"])
    assert turns_option() == []
    turns = tmp_path / "models" / "pocket-turns"
    turns.mkdir(parents=True)
    (turns / "config.json").write_text('{"model_type": "motet-turns"}')
    (turns / "model.safetensors").write_bytes(b"")
    assert turns_option() == ["--turns", str(turns)]


def test_another_nats_server_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOTET_NATS_CREDENTIALS", raising=False)
    given = ("--llm", str(folder), "--port", "0", "--nats", "nats://elsewhere:4222")
    parsed = options(*given)
    assert (parsed.nats_port, parsed.stack.nats_url, parsed.stack.credentials) == (
        None,
        "nats://elsewhere:4222",
        None,
    )
    monkeypatch.setenv("MOTET_NATS_CREDENTIALS", str(tmp_path))
    assert options(*given).stack.credentials == tmp_path.resolve()


def test_threads_are_divided_unless_the_user_sets_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    model = models.ModelFolder("m", folder)
    stack = Stack(models=(model,), nats_url="", decode=2)
    threads = {s.role: s.env["OMP_NUM_THREADS"] for s in stack.services()}
    assert threads == {"gateway": "1", "tokenizer": "1", "decode": "3", "vad": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert all("OMP_NUM_THREADS" not in s.env for s in stack.services())


def test_cores_beyond_four_are_left_to_python() -> None:
    assert [compute_cores(n) for n in (1, 2, 4, 5, 8, 16, 64)] == [1, 2, 4, 3, 6, 14, 56]


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["up", "--llm", "/nowhere", "--port", "0"], "--llm: '/nowhere'"),
        (["up", "--decode", "0"], "--decode: 0"),
    ],
)
def test_wrong_options_are_exit_code_2_and_one_line(
    argv: Sequence[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("motet up: ")
    assert word in error
    assert error.count("\n") == 1


def test_chat_starts_first_on_few_cores(folder: Path) -> None:
    services = options("--llm", str(folder), "--prefill", "1").stack.services()
    assert {spec.role for spec in services if starts_at_once(spec, len(services), 2)} == {
        "gateway",
        "tokenizer",
        "decode",
        "prefill",
    }
    assert all(starts_at_once(spec, len(services), 64) for spec in services)
