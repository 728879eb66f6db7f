"""What `motet up` refuses before it starts anything, and what it would start."""

import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from motet_cli.main import main, parser
from motet_cli.supervision import model_folders as models
from motet_cli.supervision import nats, up
from motet_cli.supervision.stack import Stack, compute_cores, goes_first
from motet_shared.errors import ConfigError
from motet_shared.testing import free_port


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Looks like a checkpoint from outside; no other models are known, those of the project neither."""
    monkeypatch.setattr(models, "model_dirs", lambda: [tmp_path])
    path = tmp_path / "tiny-llama"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def plan(*argv: str) -> up.Plan:
    return up.plan(parser().parse_args(["up", *argv]))


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*argv)
    return caught.value.message


def test_kernels_that_run_on_torch_are_warned_of_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_NATIVE", "off")
    assert "MOTET_NATIVE=off" in up.fallback_warning()
    monkeypatch.delenv("MOTET_NATIVE")
    assert up.fallback_warning() == ""
    for name, value in {"MOTET_CACHE": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}.items():
        monkeypatch.setenv(name, value)
    assert "g++" in up.fallback_warning()


def test_a_port_in_use_is_refused_by_name(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port: {port} on 127.0.0.1 is in use" in refusal(
            "--port", str(port), "--llm", str(folder)
        )


def test_other_hosts_need_a_key_or_insecure(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOTET_API_KEY", "MOTET_API_KEY_FILE", "MOTET_TENANTS_FILE"):
        monkeypatch.delenv(name, raising=False)
    common = ("--port", "0", "--llm", str(folder), "--host", "0.0.0.0")
    assert "--api-key-file" in refusal(*common)
    assert plan(*common, "--insecure").stack.insecure
    key = tmp_path / "key"
    assert "is no file" in refusal(*common, "--api-key-file", str(key))
    key.write_text("k")
    assert plan(*common, "--api-key-file", str(key)).stack.door.api_key_file == key


def test_a_file_of_tenants_is_as_good_as_keys(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--port", "0", "--llm", str(folder), "--host", "0.0.0.0")
    file = tmp_path / "tenants.toml"
    assert "motet keys new" in refusal(*common, "--tenants-file", str(file))
    file.write_text("")
    monkeypatch.setenv("MOTET_TENANTS_FILE", str(file))
    (gateway, *_) = plan(*common, "--allowed-origins", "https://a.example").stack.services()
    assert gateway.argv[gateway.argv.index("--tenants-file") + 1] == str(file)
    assert gateway.argv[gateway.argv.index("--allowed-origins") + 1] == "https://a.example"
    (gateway, *_) = plan(
        *common, "--allowed-hosts", "a.example", "--trusted-proxies", "10.0.0.0/8"
    ).stack.services()
    assert gateway.argv[gateway.argv.index("--allowed-hosts") + 1] == "a.example"
    assert gateway.argv[gateway.argv.index("--trusted-proxies") + 1] == "10.0.0.0/8"


def test_a_certificate_needs_its_key(folder: Path, tmp_path: Path) -> None:
    common = ("--port", "0", "--llm", str(folder))
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text("")
    assert "both or neither" in refusal(*common, "--tls-cert", str(cert))
    assert "is no file" in refusal(*common, "--tls-cert", str(cert), "--tls-key", str(key))
    key.write_text("")
    stack = plan(*common, "--tls-cert", str(cert), "--tls-key", str(key)).stack
    assert stack.services()[0].argv.count(str(key)) == 1


def test_an_unknown_host_is_refused(folder: Path) -> None:
    assert "192.0.2.1" in refusal("--host", "192.0.2.1", "--insecure", "--llm", str(folder))


@pytest.mark.parametrize("flag", ["--decode", "--tokenizer"])
def test_no_instances_are_refused(flag: str, folder: Path) -> None:
    assert "at least 1" in refusal(flag, "0", "--llm", str(folder), "--port", "0")


@pytest.mark.parametrize("part", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_no_checkpoint_names_what_it_lacks(part: str, folder: Path) -> None:
    (folder / part).unlink()
    message = refusal("--llm", str(folder), "--port", "0")
    assert str(folder) in message
    assert f"it lacks {part}" in message


def test_a_path_that_is_not_there_names_the_known_models(folder: Path) -> None:
    assert "known: tiny-llama" in refusal("--llm", "/nowhere", "--port", "0")


def test_models_are_found_by_name(folder: Path) -> None:
    assert models.resolve("tiny-llama").path == folder


def test_two_models_of_one_name_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    folder.rename(other / "tiny-llama")
    (other / "again").mkdir()
    copy = other / "again" / "tiny-llama"
    copy.mkdir()
    for file in (other / "tiny-llama").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert "both be served as 'tiny-llama'" in refusal(
        "--llm", str(other / "tiny-llama"), "--llm", str(copy)
    )


def test_one_decode_process_per_model_and_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_NATS_PASSWORD", "of-another-server")
    todo = plan("--llm", str(folder), "--decode", "2", "--tokenizer", "2", "--port", "0")
    services = replace(todo.stack, credentials=folder / "nats").services()
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


def test_prompts_may_be_computed_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    common = ("--llm", str(folder), "--port", "0")
    assert "prefill" not in [s.role for s in plan(*common).stack.services()]
    services = plan(*common, "--decode", "2", "--prefill", "2").stack.services()
    engines = [s for s in services if s.role in ("decode", "prefill")]
    assert [s.name for s in engines] == ["decode-1", "decode-2", "prefill-1", "prefill-2"]
    assert all(s.argv[s.argv.index("--role") + 1] == s.role for s in engines)
    assert {s.env["OMP_NUM_THREADS"] for s in engines} == {str(max(1, compute_cores() // 4))}
    assert "--prefill" in refusal(*common, "--prefill", "-1")


def test_decode_is_told_who_guesses_ahead(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def told(*argv: str) -> list[list[str]]:
        services = plan(
            "--llm", str(folder), "--port", "0", "--prefill", "1", *argv
        ).stack.services()
        engines = [list(s.argv) for s in services if s.role in ("decode", "prefill")]
        return [
            one[one.index("--speculate") + 1 :][:1] if "--speculate" in one else []
            for one in engines
        ]

    assert told() == [[], []]
    assert told("--speculate", "ngram") == [["ngram"], []]
    (tmp_path / "draft").mkdir()
    assert told("--speculate", "draft") == [[str(tmp_path / "draft")], []]


def test_voice_activity_may_be_left_out(folder: Path) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert "vad" not in [s.role for s in plan(*common, "--vad", "0").stack.services()]
    assert [s.name for s in plan(*common, "--vad", "2").stack.services()][-2:] == ["vad-1", "vad-2"]
    assert "--vad" in refusal(*common, "--vad", "-1")


@pytest.mark.parametrize(
    ("flag", "role", "kind"),
    [("tts", "tts", "vits"), ("asr", "asr", "whisper"), ("embed", "embedding", "bert")],
)
def test_a_model_of_its_own_is_served_where_there_is_one(
    flag: str, role: str, kind: str, folder: Path, tmp_path: Path
) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert getattr(plan(*common).stack, flag) is None
    model = tmp_path / f"pocket-{flag}"
    model.mkdir()
    assert 'lacks config.json with a "model_type"' in refusal(*common, f"--{flag}", str(model))
    (model / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    (model / "model.safetensors").write_bytes(b"")
    for given in ((), (f"--{flag}", model.name), (f"--{flag}", str(model))):
        (spec,) = [s for s in plan(*common, *given).stack.services() if s.role == role]
        assert spec.model == model.name
        assert spec.argv[1:5] == ("-m", f"motet_{role}", "--model", str(model))
    assert getattr(plan(*common, f"--{flag}", "none").stack, flag) is None
    assert f"--{flag}: 'nobody'" in refusal(*common, f"--{flag}", "nobody")


def test_a_planner_is_run_where_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert plan(*common).stack.planner is None
    other = shutil.copytree(folder, tmp_path / "other")
    assert "several models are served" in refusal(*common, "--llm", str(other), "--planner")
    roles = tmp_path / "roles.toml"
    roles.write_text("[decode]\nmin = 0\n")
    assert "min=0: a `motet up` keeps one of each role" in refusal(*common, "--planner", str(roles))
    roles.write_text("[decode]\nmax = 3\n")
    stack = plan(*common, "--planner", str(roles)).stack
    (spec,) = [s for s in stack.services() if s.role == "planner"]
    url = f"http://127.0.0.1:{stack.port}"
    given = ("-m", "motet_planner", "--actuator", "local", "--url", url, "--roles", str(roles))
    assert spec.argv[1 : 1 + len(given)] == given
    assert plan(*common, "--planner").stack.planner is not None


def test_speakers_are_told_apart_where_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert "--speakers: 'pocket-speakers'" in refusal(*common, "--speakers")
    voices = tmp_path / "pocket-speakers"
    voices.mkdir()
    (voices / "config.json").write_text('{"model_type": "motet-speakers"}')
    (voices / "model.safetensors").write_bytes(b"")
    assert plan(*common).stack.speakers is None
    for given in (("--speakers",), ("--speakers", str(voices))):
        (spec,) = [s for s in plan(*common, *given).stack.services() if s.role == "speakers"]
        assert spec.argv[1:5] == ("-m", "motet_speakers", "--model", str(voices))


def test_a_model_that_draws_is_served_where_there_is_one(folder: Path, tmp_path: Path) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert plan(*common).stack.draw is None
    brush = tmp_path / "pocket-draw"
    brush.mkdir()
    assert "lacks model_index.json; give a folder that diffusers loads" in refusal(
        *common, "--draw", str(brush)
    )
    (brush / "model_index.json").write_text("{}")
    for given in ((), ("--draw", "pocket-draw"), ("--draw", str(brush))):
        (spec,) = [s for s in plan(*common, *given).stack.services() if s.role == "diffusion"]
        assert spec.argv[1:5] == ("-m", "motet_diffusion", "--model", str(brush))
    assert plan(*common, "--draw", "none").stack.draw is None
    assert "--draw: 'nobody'" in refusal(*common, "--draw", "nobody")


def test_state_is_kept_in_a_folder_of_the_port(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--llm", str(folder), "--port", "0")
    assert plan(*common).store is None, "there is no port to come back to"
    port = str(free_port())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fixed = ("--llm", str(folder), "--port", port)
    assert plan(*fixed).store == tmp_path / "state" / "motet" / port
    assert plan(*fixed, "--no-store").store is None
    assert plan(*fixed, "--nats", "nats://there").store is None
    assert "--no-store" in refusal(*fixed, "--no-store", "--store", "x")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan(*fixed).store == tmp_path / ".local/state/motet" / port
    assert "--jetstream" not in nats.spec(4222, tmp_path).argv
    assert (store := plan(*common, "--store", str(tmp_path / "kept")).store) == tmp_path / "kept"
    assert nats.spec(4222, tmp_path, store).argv[-3:] == ("--jetstream", "--store_dir", str(store))
    assert "--store: the server of --nats has its own" in refusal(
        *common, "--store", "x", "--nats", "nats://there"
    )


def test_the_judge_of_turns_is_used_where_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge() -> list[str]:
        vad = next(
            s for s in plan("--llm", str(folder), "--port", "0").stack.services() if s.role == "vad"
        )
        return [part for part in vad.argv if "turns" in part]

    monkeypatch.setattr(models, "model_dirs", lambda: [tmp_path / "models"])
    assert judge() == []
    turns = tmp_path / "models" / "pocket-turns"
    turns.mkdir(parents=True)
    (turns / "config.json").write_text('{"model_type": "motet-turns"}')
    (turns / "model.safetensors").write_bytes(b"")
    assert judge() == ["--turns", str(turns)]


def test_a_nats_server_of_ones_own_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOTET_NATS_CREDENTIALS", raising=False)
    given = ("--llm", str(folder), "--port", "0", "--nats", "nats://elsewhere:4222")
    todo = plan(*given)
    assert (todo.nats_port, todo.stack.nats_url, todo.stack.credentials) == (
        None,
        "nats://elsewhere:4222",
        None,
    )
    monkeypatch.setenv("MOTET_NATS_CREDENTIALS", str(tmp_path))
    assert plan(*given).stack.credentials == tmp_path.resolve()


def test_threads_are_shared_out_and_the_users_word_wins(
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


def test_beyond_four_cores_python_has_its_own() -> None:
    assert [compute_cores(n) for n in (1, 2, 4, 5, 8, 16, 64)] == [1, 2, 4, 3, 6, 14, 56]


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["up", "--llm", "/nowhere", "--port", "0"], "neither a folder"),
        (["up", "--decode", "0"], "at least 1"),
    ],
)
def test_a_wrong_setting_is_exit_code_2_and_one_line(
    argv: Sequence[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("motet up: ")
    assert word in error
    assert error.count("\n") == 1


def test_where_cores_are_scarce_the_chat_goes_first(folder: Path) -> None:
    services = plan("--llm", str(folder), "--prefill", "1").stack.services()
    assert {spec.role for spec in services if goes_first(spec, len(services), 2)} == {
        "gateway",
        "tokenizer",
        "decode",
        "prefill",
    }
    assert all(goes_first(spec, len(services), 64) for spec in services)
