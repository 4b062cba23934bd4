"""The secret's file: made once with mode 600, and refused where others can read it. It is in no text."""

from __future__ import annotations

import os
import pickle
import threading

import pytest

import kvx
from kvx.wires.secret import Secret, read_or_make_secret, read_secret

KEY = b"0123456789abcdef" * 4


def test_it_is_made_once_and_by_its_owner_alone(tmp_path):
    path = tmp_path / "kvx" / "secret"
    old = os.umask(0)
    try:
        made, is_new = read_or_make_secret(path)
    finally:
        os.umask(old)
    assert is_new
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    again, is_new = read_or_make_secret(path)
    assert not is_new
    assert again.proof("x", b"1") == made.proof("x", b"1") == read_secret(path).proof("x", b"1")
    assert os.listdir(path.parent) == ["secret"]
    assert len(path.read_text().strip()) == 64


def test_all_who_make_it_at_once_get_the_same(tmp_path):
    path, got = tmp_path / "secret", []
    threads = [threading.Thread(target=lambda: got.append(read_or_make_secret(path))) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({s.proof("x") for s, _ in got}) == 1
    assert sum(is_new for _, is_new in got) == 1
    assert os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o660])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    path.write_bytes(KEY)
    path.chmod(mode)
    for read in (read_secret, read_or_make_secret):
        with pytest.raises(kvx.BadArgument, match=rf"can be read or changed by others \(mode {mode:03o}\): chmod 600 "):
            read(path)


@pytest.mark.parametrize(("text", "what"), [(b"", "this has 0"), (b"password", "this has 8"), (b"x" * 5000, "this has 4097")])
def test_what_is_no_random_secret_is_refused(tmp_path, text, what):
    path = tmp_path / "secret"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(kvx.BadArgument, match=f"{path}: a secret has 32 to 4096 characters.*{what}"):
        read_secret(path)


def test_a_missing_one_says_where_it_comes_from(tmp_path):
    with pytest.raises(
        kvx.BadArgument, match=r"there is no secret at .*/nope\. `kvx prefill --listen` makes it: copy that file here"
    ):
        read_secret(tmp_path / "nope")
    with pytest.raises(kvx.BadArgument, match=r"no secret can be made at .*/no/where/secret: No such file"):
        read_or_make_secret(tmp_path / "no" / "where" / "secret")


def test_a_pipe_and_a_folder_are_no_secrets(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name in ("pipe", "folder"):
        with pytest.raises(kvx.BadArgument, match="is no file"):
            read_secret(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(kvx.BadArgument, match="there is no secret"):
        read_or_make_secret(tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()


def test_it_is_in_no_text():
    secret = Secret(KEY)
    assert KEY.decode() not in f"{secret!r} {secret} {vars(secret)}"
    with pytest.raises(kvx.BadArgument, match="not pickled"):
        pickle.dumps(secret)


def test_a_proof_is_of_its_label_and_its_parts():
    secret = Secret(KEY)
    proof = secret.proof("client", b"ab", b"c")
    assert secret.proves(proof, "client", b"ab", b"c")
    for label, parts in (("server", (b"ab", b"c")), ("client", (b"a", b"bc")), ("client", (b"abc",)), ("client", (b"ab", b"d"))):
        assert not secret.proves(proof, label, *parts)
    assert not Secret(KEY + b"x").proves(proof, "client", b"ab", b"c")
    assert not secret.proves(b"", "client", b"ab", b"c")
