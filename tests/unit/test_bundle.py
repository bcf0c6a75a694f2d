"""The archive of a run for a bug report: what is in it, and what never is."""

import json
import zipfile
from pathlib import Path

import pytest

from flatout.cli import main
from flatout.observe.bundle import Private, is_bundle, scrubbed
from flatout.records import NoticeRecord, PreviewRecord, SampleRecord
from tests.made_runs import info_of, step_of, write_run

HOME = Path("/home/somebody")


def run_with_data(folder: Path) -> Path:
    key = "hf_" + "a1" * 17
    records = [
        info_of(folder, config={"eval": {"sample_prompt": "private prompt"}, "data": {"document_start": "private"}}),
        PreviewRecord(step=0, pieces=(("a row of private data", True),)),
        step_of(1),
        SampleRecord(step=1, prompt="private prompt", text="private sample"),
        NoticeRecord(step=1, message=f"read {Path.home()}/texts/a.txt with token={key}"),
    ]
    write_run(folder, records)
    texts = (
        "  document_start: private mark\n  val_source: [{path: a.txt, document_start: private mark}]\n"
        "eval:\n  sample_prompt: 'private\n\n    prompt'\n  tokens: 3\n"
    )
    (folder / "config.yaml").write_text(f"data:\n  source: {Path.home()}/texts\n{texts}", encoding="utf-8")
    return folder


def contents(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name).decode() for name in archive.namelist()}


def test_a_bundle_holds_the_run_and_none_of_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run_with_data(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--zip", "mine", "--no-doctor"]) == 0
    assert "mine-bundle.zip" in capsys.readouterr().out
    found = contents(tmp_path / "mine-bundle.zip")
    assert list(found) == ["README.txt", "config.yaml", "metrics.jsonl", "files.txt"]
    whole = "".join(found.values())
    for secret in ("private", "hf_a1", str(tmp_path / "home")):
        assert secret not in whole, secret
    left_out = (
        '  document_start: "(left out)"\n  val_source: [{path: a.txt, document_start: "(left out)"}]\n'
        'eval:\n  sample_prompt: "(left out)"\n  tokens: 3\n'
    )
    assert found["config.yaml"] == f'data:\n  source: "~/texts"\n{left_out}'
    kinds = [json.loads(line)["type"] for line in found["metrics.jsonl"].splitlines()]
    assert kinds == ["run", "step", "sample", "notice"]
    assert "metrics.jsonl" in found["files.txt"]
    assert is_bundle(tmp_path / "mine-bundle.zip")
    before = (tmp_path / "mine-bundle.zip").read_bytes()
    assert main(["report", "--zip", "mine", "--no-doctor"]) == 0, "one of ours is replaced"
    assert (tmp_path / "mine-bundle.zip").read_bytes() == before


def test_the_machine_is_described_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from flatout.finding import Check

    run_with_data(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_LOGS", "dynamo")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "not-for-you")
    monkeypatch.setenv("MY_API_KEY", "not-for-you-either")
    monkeypatch.setattr("flatout.front.looking.examine", lambda *_, **__: iter([Check("machine", "python").ok("3.11")]))
    assert main(["report", "--zip", "mine", "--out", "bug.zip"]) == 0
    found = contents(tmp_path / "bug.zip")
    assert json.loads(found["environment.json"])["environment"].get("TORCH_LOGS") == "dynamo"
    assert "not-for-you" not in "".join(found.values())
    assert '"name": "python"' in found["doctor.jsonl"]


def test_files_that_are_no_bundles_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    run_with_data(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bug.zip").write_bytes(b"mine")
    assert main(["report", "--zip", "mine", "--out", "bug.zip", "--no-doctor"]) == 2
    assert (tmp_path / "bug.zip").read_bytes() == b"mine"
    assert main(["report", "--zip", "mine", "--out", "bug.tar", "--no-doctor"]) == 2
    assert main(["report", "--zip", "nothing", "--no-doctor"]) == 2
    assert "hint:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/home/somebody/a /home/somebody", "~/a ~"),
        ("/home/else/b /Users/else C:\\Users\\else\\x", "/home/(user)/b /Users/(user) C:\\Users\\(user)\\x"),
        ("/scratch/somebody/x /scratch/somebodyelse", "/scratch/(user)/x /scratch/somebodyelse"),
        ("https://me:pass@host/x", "https://(secret)@host/x"),
        ("https://me:p@ss@host/x https://key@host", "https://(secret)@host/x https://(secret)@host"),
        ("s3://b/x?X-Amz-Signature=ab&y=z is read", "s3://b/x?(secret) is read"),
        ("api_key=abcdefgh token: 'ghijklmn'", "api_key=(secret) token: '(secret)'"),
        ("WANDB_API_KEY=abc,def access_token=abc", "WANDB_API_KEY=(secret) access_token=(secret)"),
        ('password: "two words" secret_key: x1y2', 'password: "(secret)" secret_key: (secret)'),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer (secret)"),
        ("Authorization: Basic YWxpY2U6cHc=", "Authorization: Basic (secret)"),
        ("a eyJhbGciOiJI.eyJzdWIi.x-y b", "a (secret) b"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----", "(secret)"),
        ("it said x-in-the-environment", "it said (secret)"),
        ("tokenizer: gpt2, tokens: 1000000", "tokenizer: gpt2, tokens: 1000000"),
        ("flops_per_token: 123456, max_tokens: 50000", "flops_per_token: 123456, max_tokens: 50000"),
        ("at step 3: see http://localhost:8484/ or runs/a", "at step 3: see http://localhost:8484/ or runs/a"),
    ],
)
def test_scrubbing(text: str, kept: str):
    private = Private.of({"MY_TOKEN": "x-in-the-environment", "TOKENIZERS_PARALLELISM": "false"}, HOME)
    assert scrubbed(text, private) == kept


def test_scrubbing_takes_time_in_proportion_to_the_text():
    """A word of 100,000 letters never ended: patterns were tried from each of them."""
    parts = ["a", "secret", "token ", "a.", "://", "://a", "?", "-", "token='\\", "/home/", "bearer ", "eyJ", "a=", '"']
    for part in parts:
        text = part * (100_000 // len(part))
        assert len(scrubbed(text, Private(HOME))) <= 2 * len(text), part


def test_rows_that_no_version_of_ours_wrote_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = run_with_data(tmp_path / "mine")
    rows = [
        {"type": "sample", "step": 1, "prompt": "private", "text": "private", "more": ["private"]},
        {"type": "unheard_of", "step": 1, "text": "private"},
        {"type": "notice", "step": 1, "message": "a name \udcff", "extra": {"auth_token": "0123private"}},
    ]
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--zip", "mine", "--no-doctor"]) == 0
    found = contents(tmp_path / "mine-bundle.zip")
    assert "private" not in "".join(found.values()).replace("private key", "")
    assert '"flops_per_token"' in found["metrics.jsonl"], "numbers stay"
