"""Checkpoints on an object store: a server of S3 on the loopback, a store in memory, and a folder beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch

from shardwise.checkpoint import mirror
from shardwise.checkpoint import storage as storages
from shardwise.checkpoint.background import Background
from shardwise.checkpoint.mirror import copy_checkpoint, upload
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.storage import FOLDERS, SUPERSEDED_NAME, Url, place_of, storage_of
from shardwise.checkpoint.store import find_latest, newest_checkpoint, retain, step_directory
from shardwise.cli.files import tokenize
from shardwise.launch import inject
from shardwise.spec.errors import CheckpointError, ConfigError, StorageError
from shardwise.train.config.sections import read_config
from tests.checkpoint.test_store import damage, save
from tests.checkpoint.threads import sample, whole
from tests.common.store import SECRETS, s3_server


@pytest.fixture(scope="module")
def s3():
    with s3_server() as env:
        yield env


ON_S3 = pytest.param("s3", marks=pytest.mark.long)


def place_on(scheme, request, tmp_path):
    if scheme == "s3":
        request.getfixturevalue("s3")
    name = f"{tmp_path.name}-{os.urandom(4).hex()}"
    return tmp_path / "other" if scheme == "folder" else place_of(f"{scheme}://bucket/{name}/run")


@pytest.mark.long
def test_a_later_server_is_found_at_its_own_port():
    for _ in range(2):
        with s3_server():
            assert find_latest("s3://bucket/later/run").path is None


@pytest.fixture(params=[ON_S3, "memory", "folder"])
def place(request, tmp_path):
    return place_on(request.param, request, tmp_path)


@pytest.fixture(params=[ON_S3, "memory"])
def store(request, tmp_path):
    return place_on(request.param, request, tmp_path)


def files(place):
    """fsspec's view of a store, not shared with what is tested."""
    return fsspec.filesystem(str(place).partition(":")[0], use_listings_cache=False, skip_instance_cache=True)


def job(path, place, keep=2):
    return {"upload": str(path), "to": str(place / "checkpoints"), "keep": keep, "run_id": "run"}


def values(path, step):
    pairs = [(whole(name, tensor), torch.empty_like(tensor.reshape(-1))) for name, tensor in sample(step).items()]
    open_checkpoint(path).read_into(pairs)
    return {extent.name: tensor for extent, tensor in pairs}


def names(place):
    return list(storage_of(place).list(place / "checkpoints"))


@pytest.mark.parametrize("place", ["s3", "memory", "folder"], indirect=True)
def test_a_copy_is_found_verified_and_read_and_older_ones_go(place, tmp_path):
    assert find_latest(place).path is None
    assert newest_checkpoint(place) is None
    with pytest.raises(CheckpointError, match="there is no checkpoint in "):
        find_latest(place).require()
    for step in (10, 20, 30, 40):
        assert upload(job(save(tmp_path, step), place)) == {"removed": [], "refused": []}
    found = newest_checkpoint(str(place))
    assert found == step_directory(place, 40)
    open_checkpoint(found).verify()
    for name, tensor in sample(40).items():
        assert torch.equal(values(found, 40)[name], tensor.reshape(-1))
    remaining = [name for name in names(place) if storage_of(place).list(place / "checkpoints" / name)]
    assert remaining == ["step-00000030", "step-00000040"]
    assert not copy_checkpoint(step_directory(tmp_path, 40), found)  # it is there
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step-00000041\.\n.*step-00000040"):
        open_checkpoint(step_directory(place, 41))


def test_a_url_stays_one_whatever_pathlib_makes_of_it():
    place = place_of("s3://bucket/runs/demo")
    assert (str(place), place.name, str(place.parent / "x")) == ("s3://bucket/runs/demo", "demo", "s3://bucket/runs/x")
    assert place_of(Path("s3://bucket/runs/demo")) == place_of(place) == place  # folded to s3:/ by then
    assert isinstance(place / "checkpoints", Url)
    assert not isinstance(place_of("runs/s3"), Url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://KEY:s3cr3t@bucket/run", r"^s3://bucket/run was given with credentials or options"),
        ("s3://KEY:s3c/s3cr3t@bucket/run", r"^s3://bucket/run was given with credentials or options"),
        ("gs://bucket/run?token=s3cr3t", r"^gs://bucket/run was given with credentials or options"),
        ("http://bucket/run", r"^http://bucket/run is not a URL of an object store.\n  Use s3://, gs://"),
    ],
)
def test_urls_with_credentials_and_of_other_kinds_are_refused(url, text):
    with pytest.raises(ConfigError, match=text) as caught:
        place_of(url)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://KEY:s3cr3t@bucket/run", "s3://bucket/run"),
        ("s3://KEY:a/s3cr3t@bucket/run", "s3://bucket/run"),
        ("abfs://a b:s3cr3t @bucket/run", "abfs://bucket/run"),
        ("http://user:s3cr3t@host:80/a.jsonl", "http://host:80/a.jsonl"),
        ("https://s3cr3t@host/a.jsonl", "https://host/a.jsonl"),
        ("https://h/a.csv?X-Amz-Credential=s3cr3t&X-Amz-Signature=s3cr3t", "https://h/a.csv"),
        ("https://h/a.csv?sv=2&sig=s3cr3t", "https://h/a.csv"),
    ],
)
def test_no_message_on_a_configuration_shows_the_credentials_of_a_url(url, shown):
    fields = [{"source": url}, {"eval_source": url}, {"mix": [{"source": url}]}, {"tokenizer": url}]
    for section in [*({"data": field} for field in fields), {"checkpoint": {"upload_to": url}}]:
        with pytest.raises(ConfigError, match="was given with credentials or options") as caught:
            read_config(None, base=section).raise_if_any()
        assert "s3cr3t" not in str(caught.value)
        assert f"{shown} was given" in str(caught.value) or "data" not in section
    for override in (f"data.mix={url}", f"data.seq_len={url}", f"{url}=1", url):  # what is wrong is another thing
        with pytest.raises(ConfigError) as caught:
            read_config(None, [override]).raise_if_any()
        assert "s3cr3t" not in str(caught.value)
    with pytest.raises(ConfigError, match="was given with credentials or options"):
        tokenize(url, Path("none"))


@pytest.mark.parametrize(
    "url",
    [
        "abfs://container@account.dfs.core.windows.net/a?.jsonl",
        "hf://datasets/user/name@main/a.jsonl",
        "http://host:8080/key=1/a@b.jsonl",
        "s3://bucket/part-?/key=1/*.parquet",
    ],
)
def test_a_url_of_data_without_credentials_is_left_as_it_is(url):
    assert read_config(None, base={"data": {"source": url}}).config.data.source == url


def test_a_store_whose_package_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(storages._PACKAGES, "s3", "no_such_package")
    storages._objects.cache_clear()
    with pytest.raises(ConfigError, match=r"s3:// needs no_such_package, which is not installed.\n  Install"):
        find_latest("s3://bucket/run")
    storages._objects.cache_clear()


def flip(files, file):
    content = bytearray(files.cat_file(file))
    content[-1] ^= 1
    files.pipe_file(file, bytes(content))


def shards(folder):
    return [f"{folder}/{name}" for name in storage_of(folder).list(folder) if name.startswith("shard-")]


@pytest.mark.parametrize(
    ("spoil", "reason", "is_seen"),
    [
        (lambda files, path: files.rm_file(shards(path)[0]), "the file is missing", True),
        (lambda files, path: files.pipe_file(shards(path)[0], b"123456789"), "the file has 9 bytes, expected ", True),
        (lambda files, path: files.rm_file(f"{path}/manifest.json"), None, True),
        (lambda files, path: files.pipe_file(f"{path}/manifest.json", b""), "it is not a manifest", True),
        (
            lambda files, path: flip(files, shards(path)[0]),
            "its content has the hash",
            False,
        ),
    ],
)
def test_missing_truncated_and_changed_objects_are_named(store, tmp_path, spoil, reason, is_seen):
    for step in (10, 20):
        upload(job(save(tmp_path, step), store))
    newest = step_directory(store, 20)
    spoil(files(store), newest)
    found = find_latest(store)
    assert found.step == (10 if is_seen else 20)
    if reason is None:  # no manifest: a save that is not finished, and no damaged one
        assert found.unfinished == (newest,)
        return
    with pytest.raises(CheckpointError, match=reason):
        values(newest, 20)
    found = find_latest(store, verify=True)
    assert found.step == 10
    assert reason in found.rejected[0][1]
    upload(job(step_directory(tmp_path, 20), store))  # a resume copies it again
    if is_seen:
        assert find_latest(store, verify=True).step == 20


@pytest.mark.parametrize("point", ["store_before_file", "store_after_file", "store_before_manifest"])
def test_an_upload_that_was_cut_off_is_not_found_and_is_taken_up_or_removed(place, tmp_path, monkeypatch, point):
    upload(job(save(tmp_path, 10), place))
    cut = save(tmp_path, 20)
    monkeypatch.setattr(inject, "_FAULTS", inject.parse(f"{point}:raise"))
    with pytest.raises(inject.InjectedError):
        upload(job(cut, place))
    monkeypatch.setattr(inject, "_FAULTS", [])
    assert find_latest(place).step == 10
    assert len(find_latest(place).unfinished) == (point != "store_before_file")
    done = upload(job(save(tmp_path, 30), place, keep=3))
    assert done["removed"] == [path for path in done["removed"] if path.startswith("step-00000020")]
    assert find_latest(place).unfinished == ()
    upload(job(step_directory(tmp_path, 20), place, keep=3))  # a step that was removed can be copied all the same
    assert [path.name for path in retain(place, 3, run_id="run").good][1] == "step-00000020"


def test_what_is_there_already_is_not_copied_again(store, tmp_path, monkeypatch):
    path = save(tmp_path, 10)
    monkeypatch.setattr(inject, "_FAULTS", inject.parse("store_before_manifest:raise"))
    with pytest.raises(inject.InjectedError):
        upload(job(path, store))
    monkeypatch.setattr(inject, "_FAULTS", [])
    first = files(store).modified(shards(step_directory(store, 10))[0])
    upload(job(path, store))
    assert find_latest(store).step == 10
    assert files(store).modified(shards(step_directory(store, 10))[0]) == first


def test_a_damaged_checkpoint_is_not_published_a_second_time(place, tmp_path):
    path = save(tmp_path, 10)
    damage(path)
    with pytest.raises(CheckpointError, match=r"was not copied to .*: the content of shard-\S+ has the hash"):
        upload(job(path, place))
    assert find_latest(place).path is None


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_store_that_is_lost_behind_a_committed_copy_has_it_and_the_next_upload_removes_what_is_older(
    store, tmp_path, monkeypatch
):
    for step in (10, 20):
        upload(job(save(tmp_path, step), store))

    def lost(*_args: object, **_named: object) -> None:
        raise StorageError("the store cannot be reached.")

    with monkeypatch.context() as patched:
        patched.setattr(mirror, "find_latest", lost)
        done = upload(job(save(tmp_path, 30), store))
    assert done == {"removed": [], "refused": [("what is older", "the store cannot be reached.")]}
    assert newest_checkpoint(store) == step_directory(store, 30)
    upload(job(save(tmp_path, 40), store))
    assert [name for name in names(store) if storage_of(store).list(store / "checkpoints" / name)] == [
        "step-00000030",
        "step-00000040",
    ]


def test_retention_leaves_what_is_not_of_a_checkpoint_and_two_good_ones(store, tmp_path):
    for step in (10, 20, 30):
        upload(job(save(tmp_path, step), store, keep=3))
    files(store).pipe_file(f"{step_directory(store, 10)}/notes.txt", b"mine")
    files(store).rm_file(shards(step_directory(store, 30))[0])
    done = upload(job(save(tmp_path, 40), store, keep=1))  # 40 and 20 are good
    refused = dict(done["refused"])
    assert "the file is missing" in refused["step-00000030"]
    assert refused["step-00000010"] == "it holds 'notes.txt', which is not part of a checkpoint"
    assert names(store) == ["step-00000010", "step-00000020", "step-00000030", "step-00000040"]


def test_what_a_resume_sets_aside_is_not_found_and_goes_with_the_next_upload(place, tmp_path):
    for step in (10, 20):
        upload(job(save(tmp_path, step), place))
    storage_of(place).remove(step_directory(place, 20), is_kept=True)
    assert find_latest(place).step == 10
    published = step_directory(place, 20)
    if isinstance(place, Url):
        assert SUPERSEDED_NAME in storage_of(place).list(published)
        assert shards(published)
    upload(job(save(tmp_path / "again", 20), place))  # the step is made again, by another save
    assert find_latest(place, verify=True).step == 20
    assert SUPERSEDED_NAME not in storage_of(place).list(published)
    assert find_latest(place).unfinished == ()


def test_what_a_resume_sets_aside_stays_until_its_steps_are_made_again(store, tmp_path):
    for step in range(10, 70, 10):
        upload(job(save(tmp_path, step), store, keep=9))
    for step in (30, 40, 50, 60):
        storage_of(store).remove(step_directory(store, step), is_kept=True)
    assert find_latest(store).step == 20
    assert find_latest(store).unfinished == ()
    assert upload(job(save(tmp_path / "again", 25), store, keep=9)) == {"removed": [], "refused": []}
    aside = [step for step in (30, 40, 50, 60) if shards(step_directory(store, step))]
    assert aside == [30, 40, 50, 60]
    assert upload(job(save(tmp_path / "again", 45), store, keep=9)) == {"removed": [], "refused": []}
    assert [step for step in aside if shards(step_directory(store, step))] == [50, 60]
    upload(job(save(tmp_path / "again", 50), store, keep=9))
    assert find_latest(store, verify=True).step == 50
    assert SUPERSEDED_NAME not in storage_of(store).list(step_directory(store, 50))


def test_two_runs_at_one_place_leave_each_other_s_checkpoints(place, tmp_path):
    for step in (10, 30, 40):
        upload(job(save(tmp_path / "a", step), place, keep=9))
    with pytest.raises(CheckpointError, match=r"step-00000010 is a checkpoint of the run 'run', and this is 'other'"):
        upload({**job(save(tmp_path / "b", 10, run_id="other"), place), "run_id": "other"})
    done = upload({**job(save(tmp_path / "b", 20, run_id="other"), place), "run_id": "other"})
    assert done == {"removed": [], "refused": []}  # those of the other run do not count as newer ones of this
    found = {step: open_checkpoint(step_directory(place, step)) for step in (10, 20, 30, 40)}
    assert [each.manifest.run_id for each in found.values()] == ["run", "other", "run", "run"]
    for each in found.values():
        each.verify()


@pytest.mark.long  # tests/train/test_train_uploads.py does so too
def test_uploads_are_made_by_a_process_that_says_what_failed(s3, tmp_path):
    process, store = Background(), place_of(f"s3://bucket/{tmp_path.name}/run")
    try:
        process.begin(job(save(tmp_path, 10), store), None, {})
        assert process.wait() == {"removed": [], "refused": []}
        process.begin(job(step_directory(tmp_path, 10), place_of("s3://no-such-bucket/run")), None, {})
        outcome = process.wait()
    finally:
        process.close()
    assert outcome["is_storage"]
    assert "no-such-bucket" in outcome["problem"]
    assert "See that the store can be reached" in outcome["problem"]
    assert open_checkpoint(step_directory(store, 10)).step == 10


def test_an_error_of_a_store_says_what_and_where_without_credentials(monkeypatch):
    class Store:
        def ls(self, *_, **__):
            raise ValueError(f"refused {SECRETS['AWS_SECRET_ACCESS_KEY']} of\n{SECRETS['AWS_ACCESS_KEY_ID']}")

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storages, "_objects", lambda _: storages._Objects(Store()))
    with pytest.raises(StorageError) as caught:
        find_latest("s3://bucket/run")
    text = str(caught.value)
    assert text.startswith("s3://bucket/run/checkpoints cannot be listed: ValueError: refused *** of ***.\n")
    assert "the environment has credentials" in text
    assert caught.value.exit_code == 74
    assert not any(value in text for value in SECRETS.values())


def test_folders_are_read_without_following_links(tmp_path):
    path = save(tmp_path, 10)
    (path / "link").symlink_to(path / "manifest.json")
    assert FOLDERS.list(path)["link"] == "it is a symbolic link"
    assert FOLDERS.list(tmp_path / "none") == {}


def test_nothing_imports_fsspec_before_a_store_is_named():
    code = "import sys, shardwise, shardwise.train.launcher; print('fsspec' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "False False\n"
