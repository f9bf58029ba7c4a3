"""Which set is in use: the operator's, the published or the shipped one, and never a bad one."""

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.thresholds import ActiveThresholds, ThresholdEvent
from retrieval.threshold_store import Activation, Pointer
from tests.support.threshold_sets import set_like_shipped
from valuspec.errors import ThresholdError
from valuspec.thresholds import ThresholdSet

MODEL = "some-model"
A, B, C = (set_like_shipped(MODEL, note) for note in "abc")


@pytest.fixture
def told() -> list[ThresholdEvent]:
    return []


@pytest.fixture
def active(told) -> ActiveThresholds:
    """Without a store."""
    return ActiveThresholds(MODEL, notify=told.append)


@pytest.fixture
def following(told) -> ActiveThresholds:
    """With a store."""
    return ActiveThresholds(MODEL, has_store=True, notify=told.append)


def write(path: Path, thresholds: ThresholdSet) -> str:
    path.write_text(thresholds.to_json())
    return str(path)


def pointer(revision: int, thresholds: ThresholdSet, epoch: str = "e") -> Pointer:
    return Pointer(epoch, (Activation(revision, thresholds.version, None, "test"),))


def publish(active: ActiveThresholds, revision: int, thresholds: ThresholdSet, epoch="e") -> bool:
    """Offer as a follower does; whether the set was asked for."""
    seen = pointer(revision, thresholds, epoch)
    version = active.consider(seen)
    if version is not None:
        active.offer(version, thresholds, seen)
    return version is not None


def reasons(told: list[ThresholdEvent]) -> str:
    """Of the events since the last call."""
    text = "; ".join(event.reason for event in told)
    told.clear()
    return text


# -- files


def test_it_begins_with_the_shipped_set_and_returns_to_it(active, tmp_path) -> None:
    shipped = active.current.version
    assert active.apply({"threshold_file": write(tmp_path / "set.json", A)})
    assert active.current.version == A.version != shipped
    assert active.apply({"threshold_file": None})
    assert active.current.version == shipped


def refused(active, told, config: dict[str, Any]) -> str:
    before = active.current
    told.clear()
    assert not active.apply(config)
    assert active.current is before, "the last good set stays"
    assert [event.kind for event in told] == ["refused"]
    return reasons(told)


def test_bad_files_are_refused_with_the_reason(active, told, tmp_path) -> None:
    path = tmp_path / "set.json"
    config = {"threshold_file": write(path, A)}
    assert active.apply(config)
    good = json.loads(path.read_text())

    write(path, set_like_shipped("another-model", "a"))
    assert "another-model" in refused(active, told, config)
    for garbage in ("{not json", "[" * 100_000):
        path.write_text(garbage)
        assert "not a threshold set" in refused(active, told, config)
    good["buckets"][0]["tau"] = float("nan")
    path.write_text(json.dumps(good))
    assert "NaN" in refused(active, told, config)
    missing = {"threshold_file": str(tmp_path / "none.json")}
    assert "none.json" in refused(active, told, missing)


def test_a_version_asked_for_must_be_that_of_the_file(active, told, tmp_path) -> None:
    path = write(tmp_path / "set.json", A)
    config = {"threshold_file": path, "threshold_version": "0" * 16}
    assert A.version in refused(active, told, config)
    assert active.apply({"threshold_file": path, "threshold_version": A.version})
    assert active.apply({"threshold_file": path, "threshold_version": "latest"})


def test_without_a_store_only_the_shipped_version_can_be_pinned(active, told) -> None:
    assert A.version in refused(active, told, {"threshold_version": A.version})
    assert active.apply({"threshold_version": active.current.version})
    assert active.pinned == active.current.version


# -- the pointer


def test_a_published_set_is_taken_once(following, told) -> None:
    assert following.consider(None) is None
    assert following.origin == "shipped"
    assert publish(following, 1, A)
    assert (following.current, following.origin, following.revision) == (A, "store", 1)
    assert not publish(following, 1, A)
    assert [(e.kind, e.new, e.reason) for e in told] == [("changed", A.version, "revision 1: test")]


def test_a_pointer_to_the_set_in_use_fetches_nothing(following, told) -> None:
    assert not publish(following, 1, following.current)
    assert (following.origin, following.revision) == ("store", 1)
    assert told == []


def test_older_revisions_are_refused(following, told) -> None:
    publish(following, 5, A)
    told.clear()
    for _ in range(3):  # polls repeat, the event does not
        assert not publish(following, 4, B)
    assert following.current is A
    assert "from revision 5 to 4" in reasons(told)
    assert publish(following, 6, B)


def test_another_set_under_the_same_revision_is_an_alarm(following, told) -> None:
    publish(following, 5, A)
    told.clear()
    assert not publish(following, 5, B)
    assert following.current is A
    assert "CONFLICT" in reasons(told)


def test_in_a_store_that_was_emptied_revisions_begin_again(following) -> None:
    publish(following, 5, A)
    assert following.consider(None) is None
    assert following.current is A, "what is good stays"
    assert publish(following, 1, B, epoch="another")
    assert following.current is B


@pytest.mark.parametrize(
    "bad",
    [
        ThresholdError("not a threshold set"),
        set_like_shipped("another-model", "a"),
        set_like_shipped(MODEL, "something else"),
    ],
    ids=["unreadable", "another model's", "another version"],
)
def test_an_unusable_set_is_refused_once_and_not_asked_for_again(following, told, bad) -> None:
    publish(following, 1, A)
    told.clear()
    seen = pointer(2, B)
    assert following.consider(seen) == B.version
    following.offer(B.version, bad, seen)
    assert following.current is A
    assert [(e.kind, e.new) for e in told] == [("refused", B.version)]
    assert following.consider(seen) is None
    assert publish(following, 3, C)


def test_a_set_that_is_no_longer_wanted_when_it_arrives_is_dropped(following, tmp_path) -> None:
    seen = pointer(1, A)
    version = following.consider(seen)
    following.apply({"threshold_file": write(tmp_path / "set.json", B)})
    following.offer(version, A, seen)
    assert following.current.version == B.version


# -- the operator's choice against the pointer


def test_a_file_is_used_whatever_is_published(following, tmp_path) -> None:
    publish(following, 1, A)
    following.apply({"threshold_file": write(tmp_path / "set.json", B)})
    assert not publish(following, 2, C)
    assert (following.current.version, following.revision) == (B.version, 0)
    following.apply({})
    assert publish(following, 2, C)
    assert following.current is C


def test_leaving_a_file_with_nothing_published_leads_to_the_shipped_set(
    following, tmp_path
) -> None:
    shipped = following.current.version
    following.apply({"threshold_file": write(tmp_path / "set.json", B)})
    following.apply({})
    assert following.current.version == B.version, "until the store has answered"
    following.consider(None)
    assert following.current.version == shipped


def test_a_pinned_version_is_fetched_and_kept_until_unpinned(following) -> None:
    publish(following, 1, A)
    assert following.apply({"threshold_version": B.version})
    assert following.current is A, "until it has come"
    assert following.consider(pointer(1, A)) == B.version
    following.offer(B.version, B, pointer(1, A))
    assert (following.current, following.origin) == (B, "pinned")
    assert not publish(following, 2, C)
    following.apply({"threshold_version": "latest"})
    assert publish(following, 2, C)


def test_pinning_needs_no_pointer(following) -> None:
    following.apply({"threshold_version": B.version})
    assert following.consider(None) == B.version
    following.offer(B.version, B, None)
    assert following.current is B


def test_unpinning_follows_the_same_revision_again(following) -> None:
    publish(following, 1, A)
    following.apply({"threshold_version": B.version})
    following.offer(B.version, B, pointer(1, A))
    following.apply({})
    assert publish(following, 1, A)
    assert following.current is A


# -- sets found slow


def test_a_slow_set_gives_way_to_the_one_before_and_stays_out(following, told) -> None:
    publish(following, 1, A)
    publish(following, 2, B)
    told.clear()
    following.found_slow(0.8)
    assert (following.current, following.origin) == (A, "rolled_back")
    assert [(e.kind, e.old, e.new) for e in told] == [("rolled_back", B.version, A.version)]
    assert "0.80x" in reasons(told)
    assert not publish(following, 2, B), "not again by the same activation"
    assert publish(following, 3, B), "somebody means it"


def test_going_back_ends_at_the_shipped_set(following, told) -> None:
    shipped = following.current
    publish(following, 1, A)
    publish(following, 2, B)
    for expected in (A, shipped, shipped, shipped):
        following.found_slow(0.5)
        assert following.current is expected
    kinds = [e.kind for e in told]
    assert kinds == ["changed", "changed", "rolled_back", "rolled_back", "slow"]


def test_a_set_found_slow_is_not_gone_back_to(following) -> None:
    publish(following, 1, A)
    following.found_slow(0.5)
    publish(following, 2, B)
    following.found_slow(0.5)
    assert following.current.version == ThresholdSet.starting(MODEL).version


def test_the_operators_choice_stays_even_if_slow(following, told, tmp_path) -> None:
    following.apply({"threshold_file": write(tmp_path / "set.json", B)})
    following.found_slow(0.5)
    assert following.current.version == B.version
    assert told[-1].kind == "slow"
