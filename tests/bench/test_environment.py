"""What a row says of the machine and the source that made it."""

from flyweight.bench import environment


def test_the_commit_is_that_of_the_tree_unless_told(monkeypatch):
    monkeypatch.delenv("FLYWEIGHT_COMMIT", raising=False)
    monkeypatch.setattr(
        environment, "_first_line", lambda command: "0123abcd" if command[0] == "git" else None
    )
    assert environment.commit() == "0123abcd"
    monkeypatch.setenv("FLYWEIGHT_COMMIT", "89ab4567")
    assert environment.commit() == "89ab4567"
